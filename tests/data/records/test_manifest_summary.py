"""What is said of a record set, and when a loss is a warning."""

from encdec_adapt.data.records import manifest_summary


def test_documents_tokens_and_losses_are_said():
  counts = dict(
    rows=10,
    pairs=45,
    examples=45,
    encoder_positions=900,
    target_tokens=450,
    shared_sentinel_spans=0,
    dropped=5,
    truncated=5,
    short_windows=6,
    documents=90,
    bad_documents=10,
  )
  spec = dict(source='text:a + text:b', encoder_length=100, decoder_length=50)
  # Two objectives and two passes read the 30 documents of `a`.
  parts = [
    {**counts, 'objective': objective, 'source': source, 'documents': number}
    for objective, source, number in (
      ('prefix_lm', 'text:a', 60),
      ('causal_lm', 'text:a', 60),
      ('causal_lm', 'text:b', 30),
    )
  ]
  manifest = dict(spec=spec, totals=counts, parts=parts, passes=[{}, {}])
  manifest['fill'] = dict(encoder=0.9, decoder=0.9)
  lines = manifest_summary.describe(manifest).splitlines()
  assert lines[0] == (
    'text:a + text:b: 45 documents, 10 rows in 2 passes, 45 examples, 900 input'
    ' and 450 target tokens, encoder 90.0%, decoder 90.0% full; 5 examples'
    ' longer than a row were dropped; 5 examples longer than a row were'
    ' truncated; 6 last windows shorter than the option shortest were dropped;'
    ' 10 documents could not be read'
  )
  # A tenth of the examples is no warning, and neither is that of the documents.
  assert [line.partition(': ')[2] for line in lines[4:]] == [
    'examples longer than a row were truncated: 11%',
    'last windows shorter than the option shortest were dropped: 12%',
  ]
  # An earlier version's manifest has no count of documents.
  for part in (counts, *parts):
    del part['documents']
  lines = manifest_summary.describe(manifest).splitlines()
  assert lines[0].startswith('text:a + text:b: 10 rows in 2 passes, 45 ex')
  assert sum('WARNING' in line for line in lines) == 2
  # Nor of targets that lose text.
  manifest_summary.check_targets(manifest, 'fail')
