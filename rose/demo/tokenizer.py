"""Local word-level tokenizers for the demo's tiny models.

Owns: turning a fixed word list into a Hugging Face fast tokenizer. Promises: one whitespace-separated word
is one token, every id decodes, the same words give the same ids, and nothing is fetched. Never trains,
never guesses a word list: who speaks the language (`rose.demo.frozenlake`) owns its words.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
SPECIAL_WORDS = (PAD, END, UNKNOWN)


def word_tokenizer(words: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer over ``words``, padded with filler words up to ``vocab_size`` ids.

    Fillers exist so that every id a model of ``vocab_size`` can sample decodes to something.

    Raises:
        ValueError: a word repeats, contains whitespace, or the words don't fit.
    """
    listed = [*SPECIAL_WORDS, *words]
    if len(set(listed)) != len(listed):
        raise ValueError("words repeat, or collide with the special words")
    if any(word.split() != [word] for word in listed):
        raise ValueError("a word must be non-empty and hold no whitespace")
    if len(listed) > vocab_size:
        raise ValueError(f"{len(listed)} words don't fit into a vocabulary of {vocab_size}")
    listed += [f"<extra{index}>" for index in range(vocab_size - len(listed))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(listed)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def numbered_words(count: int) -> list[str]:
    """``count`` meaningless words, for a model whose text nobody reads (the serving side's)."""
    return [f"w{index}" for index in range(count)]
