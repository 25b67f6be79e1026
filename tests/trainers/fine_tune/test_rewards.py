"""The prompts and the reward of `rose serve --fine-tune-reward`: what is kept, and what is refused."""

import logging

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from rose.errors import ConfigError
from rose.measure.models import numbered_words, word_tokenizer
from rose.node.fine_tune.examples import Prompt
from rose.trainers.fine_tune.rewards import RewardedPrompts, load_reward
from tests.trainers.fine_tune.toy_reward import wanted_words

TOKENIZER = word_tokenizer(numbered_words(40), 64)
MODULE = "tests.trainers.fine_tune.toy_reward"


def prompts(*texts: str, length: int) -> RewardedPrompts:
    rows = [Prompt(prompt=text, columns={}) for text in texts]
    return RewardedPrompts(rows, wanted_words, TOKENIZER, length, answer_tokens=4, samples=2)


def test_prompts_without_room_for_an_answer_are_left_out_and_none_left_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = prompts("w1 w2", "w1 w2 w3", length=6)
    assert [each.prompt for each in found.kept] == ["w1 w2"] and found.longest == 6
    assert "1 of 2 prompts are left out" in caplog.text
    with pytest.raises(ConfigError, match="of 1 prompts none leaves room for an answer of 4 tokens within 6"):
        prompts("w1 w2 w3", length=6)


def test_a_chat_is_rendered_by_the_tokenizers_template_and_refused_without_one() -> None:
    row = Prompt(prompt=[{"role": "user", "content": "w1 w2"}], columns={})
    with pytest.raises(ConfigError, match="the model's tokenizer has no chat template"):
        RewardedPrompts([row], wanted_words, TOKENIZER, 8, answer_tokens=4, samples=2)
    tokenizer = word_tokenizer(numbered_words(40), 64)
    tokenizer.chat_template = (
        "{% for m in messages %}w9 {{ m['content'] }} {% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}w8{% endif %}"
    )
    found = RewardedPrompts([row], wanted_words, tokenizer, 8, answer_tokens=4, samples=2)
    assert found.longest == 4 + len(tokenizer.encode("w9 w1 w2 w8", add_special_tokens=False)) == 8
    row = Prompt(prompt=[{"role": "system", "content": "w1"}, *found.kept[0].prompt], columns={})
    with pytest.raises(ConfigError, match="template refuses messages of system, user: no system role"):
        RewardedPrompts([row], wanted_words, tokenizer, 8, answer_tokens=4, samples=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{MODULE}_of_nobody:wanted_words", "can't be imported"),
        (f"{MODULE}:unwanted_words", f"{MODULE} has no function unwanted_words"),
    ],
)
def test_a_reward_is_imported_or_refused_with_one_line(name: str, message: str) -> None:
    assert load_reward(f"{MODULE}:wanted_words") is wanted_words
    with pytest.raises(ConfigError, match=message) as refused:
        load_reward(name)
    assert "\n" not in str(refused.value)


def test_a_reward_gets_the_columns_as_they_stand_in_the_file() -> None:
    seen: list[object] = []

    def reward(completions: list[str], answer: list[object], **_: object) -> list[float]:
        seen.extend(answer)
        return [1.0] * len(completions)

    rows = [Prompt(prompt="w1", columns={"answer": each}) for each in (1, 1.5, "4", {"m": 1})]
    judge = RewardedPrompts(rows, reward, TOKENIZER, 8, answer_tokens=4, samples=2).judge()
    assert judge.__name__ == "reward"
    assert judge(completions=["w1"] * 4, rose_row=[3, 2, 1, 0]) == [1.0] * 4
    assert seen == [{"m": 1}, "4", 1.5, 1]
