"""Refuses cross-site requests through a user's browser.

A web page may post to any address reachable by its reader, and read the answers
if a name of its site resolves to a loopback address (DNS rebinding).

Works for any ASGI application.
"""

import ipaddress
import re

from starlette import datastructures, responses, types

from encdec_adapt.server import protocol


class Guard:
  """ASGI middleware that checks `Host`, `Origin` and `Sec-Fetch-Site`.

  Requests without these headers pass: only browsers send `Origin`, and HTTP/1.0
  needs no `Host`.
  """

  def __init__(self, app: types.ASGIApp, host: str):
    """Wraps an application.

    Args:
      app: the application.
      host: address to listen on.
    """
    # Names of non-loopback addresses are unknown, so any `Host` passes.
    self._app, self._names = app, None
    if _is_loopback(host):
      names = 'localhost', '127.0.0.1', '[::1]', host
      self._names = re.compile(f'({"|".join(map(re.escape, names))})(:[0-9]+)?')

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    """Answers with status 403, or forwards the request."""
    app = self._app
    if scope['type'] == 'http' and (fault := self._fault(scope)):
      body = protocol.ApiError(403, fault).body
      app = responses.JSONResponse(body, 403)
    await app(scope, receive, send)

  def _fault(self, scope: types.Scope) -> str | None:
    headers = datastructures.Headers(scope=scope)
    host = headers.get('host', '').lower()
    if self._names and 'host' in headers and not self._names.fullmatch(host):
      return (
        f'Host is {host!r}; a server on a loopback address answers to'
        ' localhost, 127.0.0.1 and [::1] only.'
      )
    # Other methods have no effects, and any page may link here.
    if scope['method'] != 'POST':
      return None
    # Pages cannot change `Origin`. It includes port and scheme: another server
    # on this machine is another origin.
    server = f'{scope.get("scheme")}://{host}'
    for origin in headers.getlist('origin'):
      if origin.lower() != server:
        return f'Origin is {origin!r}; only pages of {server} may post.'
    # Pages cannot set this header either.
    if headers.get('sec-fetch-site') == 'cross-site':
      return 'Sec-Fetch-Site is cross-site; pages of other sites may not post.'
    return None


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:  # A host name.
    return host.lower() == 'localhost'
