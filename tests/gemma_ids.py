"""The special ids of Gemma's layout, as tests frame rows with them."""

from encdec_adapt.tokenizers import special_ids

PAD, EOS, BOS = 0, 1, 2
SIDE = special_ids.SideIds(pad=PAD, eos=EOS, bos=BOS)
FRAMING = special_ids.Framing(SIDE, SIDE)
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
