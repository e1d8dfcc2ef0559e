"""Metrics of texts on literal ones."""

import importlib.util

import pytest

from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import text_metrics

pytest.importorskip('sacrebleu', reason="needs pip install -e '.[eval]'")
PREDICTIONS = ['The cat sat on the mat.', 'two dogs', '', 'A red house']
REFERENCES = [
  ['the cat sat on the mat'],
  ['three dogs ran', 'two dogs!'],
  ['nothing'],
  ['the blue house stands'],
]
# A sentence of each script, of the languages that NTREX has.
SENTENCES = {
  'Amharic': 'መርከቡ ዛሬ ጠዋት ወደ ወደብ ገባ።',
  'Arabic': 'وصلت السفينة إلى الميناء هذا الصباح.',
  'Burmese': 'သင်္ဘောသည် ယနေ့နံနက် ဆိပ်ကမ်းသို့ ရောက်ရှိသည်။',
  'Chinese': '这艘船今天早上到达了港口。',
  'English': 'The ship reached the harbour this morning.',
  'German': 'Das Schiff erreichte heute früh den Hafen.',
  'Hindi': 'जहाज़ आज सुबह बंदरगाह पर पहुँचा।',
  'Japanese': '船は今朝、港に着きました。',
  'Khmer': 'កប៉ាល់បានមកដល់កំពង់ផែនៅព្រឹកនេះ។',
  'Korean': '배가 오늘 아침 항구에 도착했다.',
  'Lao': 'ເຮືອມາຮອດທ່າເຮືອໃນເຊົ້ານີ້.',
  'Russian': 'Корабль сегодня утром пришёл в порт.',
  'Tamil': 'கப்பல் இன்று காலை துறைமுகத்தை அடைந்தது.',
  'Thai': 'เรือมาถึงท่าเรือเมื่อเช้านี้',
  'Tibetan': 'གྲུ་གཟིངས་དེ་རིང་ཞོགས་པ་གྲུ་ཁར་འབྱོར།',
}
BLEU = dict.fromkeys(('Burmese', 'Khmer', 'Lao', 'Thai', 'Tibetan'), '/char')
HAS_MECAB = importlib.util.find_spec('MeCab')
BLEU |= {'Chinese': '/zh', 'Japanese': '/ja-mecab' if HAS_MECAB else '/char'}


def _scores(predictions, references, names=''):
  tokenizers = text_metrics.choose(references, names)
  scores, _ = text_metrics.score('x', predictions, references, tokenizers)
  return {score.metric: score for score in scores}


@pytest.mark.parametrize('language', SENTENCES)
def test_a_perfect_answer_has_the_best_score_in_every_script(language):
  texts = [SENTENCES[language]]
  scores = _scores(texts, [texts])
  found = {name: score.value for name, score in scores.items()}
  suffix = '/unicode' * (language != 'English')
  expected = {f'rouge{n}{suffix}': 1 for n in ('1', '2', 'L', 'Lsum')}
  expected |= {f'bleu{BLEU.get(language, "")}': 100, 'chrf': 100}
  assert found == pytest.approx(expected | {'exact_match': 1, 'f1': 1})


def test_english_has_rouge_scores_words_and_names_are_checked():
  from rouge_score import rouge_scorer

  scorer = rouge_scorer.RougeScorer(['rouge2'], use_stemmer=True)
  text, reference = "He's running a café in 2024", "he'd run 2024 cafés"
  expected = scorer.score(reference, text)['rouge2'].fmeasure
  english = [SENTENCES['English']] * 50
  found = _scores([text, *english], [[x] for x in (reference, *english)])
  assert found['rouge2'].scores[0] == expected
  found = _scores([text], [[reference]], 'intl,unicode')
  assert {'bleu/intl', 'rouge2/unicode'} < found.keys()
  for names in ('klingon', '13a,porter'):
    with pytest.raises(errors.UserError, match=f'--tokenizers={names} must be'):
      text_metrics.choose([[text]], names)


def test_literal_scores():
  found = _scores(PREDICTIONS, REFERENCES)
  assert found['exact_match'].scores == (1, 1, 0, 0)
  # 'red house' and 'blue house stands' share one word of 2 and 3.
  assert found['f1'].scores == pytest.approx((1, 1, 0, 0.4))
  assert found['f1'].value == pytest.approx(0.6)
  assert found['f1'].stderr == pytest.approx(0.2449, abs=1e-4)
  # 'a red house' against 'the blue house stands': 2 * (1/3 * 1/4) / (7/12).
  assert found['rouge1'].scores == pytest.approx((1, 1, 0, 2 / 7))
  assert found['rougeL'].n == 4
  assert 1 < found['bleu'].value < 100 and 1 < found['chrf'].value < 100
  assert found['bleu'].stderr is None
  # Lines in another order share all of their words and longest subsequences.
  found = _scores(['b c\na d'], [['a d\nb c']])
  assert found['rougeL'].value == 0.5 and found['rougeLsum'].value == 1


def test_corpus_scores_are_those_of_sacrebleu():
  import sacrebleu

  texts = ['the cat is on a mat today', 'a dog barks at the red car']
  references = [['the cat is on the mat today'], ['the dog barks at a red car']]
  found = _scores(texts, references)
  want = sacrebleu.corpus_bleu(texts, [[one for (one,) in references]])
  assert found['bleu'].value == pytest.approx(want.score)
  assert 10 < found['bleu'].value < 90
