"""A byte-level tokenizer made from nothing: small enough for a tiny policy, exact for any text."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

# One piece never crosses a line; the envelope of a tool call, a word, a digit and a run of signs are pieces of their
# own. Pieces are what may become single tokens: the envelope is the same in every call, so it should cost one.
_PIECES = r'\{"name": "\w+", "arguments": \{("\w+": ")?|\n *| ?[A-Za-z_]+| *\d|\t *| ?[^\sA-Za-z_\d]+|\s+'


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Return a byte-pair tokenizer of at most `vocab_size` tokens, learned from the texts.

    Every byte is a token, so decoding gives back any text that was encoded, unless it skips special tokens; those
    come first.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [Split(Regex(_PIECES), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
