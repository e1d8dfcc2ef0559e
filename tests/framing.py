"""The special ids of Gemma's layout, as tests frame rows with them."""

from encdec_adapt.data import batch

PAD, EOS, BOS = 0, 1, 2
SIDE = batch.SideIds(pad=PAD, eos=EOS, bos=BOS)
FRAMING = batch.Framing(SIDE, SIDE)
# What a manifest says of such vocabularies.
DESCRIBED = {
  side: {
    'fingerprint': 'abc',
    'size': 1000,
    'special_tokens': {
      'pad': {'id': PAD, 'token': '<pad>'},
      'eos': {'id': EOS, 'token': '<eos>'},
      'bos': {'id': BOS, 'token': '<bos>'},
    },
  }
  for side in ('encoder', 'decoder')
}
