"""Text of a generated task family as documents for the pretrain and sft stages."""

from collections.abc import Iterator
from itertools import groupby, islice
from random import Random
from typing import Any, cast

from tokenizers import Tokenizer

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.renderers.family import FamilyRenderer
from etude.policy.tokenizer import train_tokenizer
from etude.runtime.families import Corpus, family_of
from etude.runtime.task_sets import heldout_problems, training_problems
from etude.tasks.mini_talk import SYSTEM, Message
from etude.training.supervised import Document, rows_of

RENDERER = "chatml-compact"
_TOKENIZER_DOCUMENTS = 2000
_SHORT_SHARE = 0.18
"""Share of pretraining on short sources alone: attention learns to copy there before it is asked to look further."""

_TOOLS = [{"type": "function", "function": {"name": name}} for name in ("shell", "submit")]


def corpus_problems(config: RunConfig) -> list[Any]:
    """Return problems to pretrain on; none shares its text with a held-out one."""
    tasks = family_of(config).tasks
    exclude = tasks.texts_of(heldout_problems(config))
    return list(islice(tasks.problems(f"corpus-{config.run.seed}", exclude=exclude), config.pretrain.documents))


def family_tokenizer(problems: list[Any], vocab_size: int, corpus: Corpus[Any]) -> Tokenizer:
    """Return a tokenizer learned from sources and from conversations about them."""
    chosen = problems[:_TOKENIZER_DOCUMENTS]
    conversations = corpus.demonstrations(chosen, seed="tokenizer", good_share=1.0, is_full=lambda _: True)
    texts = [corpus.source(problem) for problem in chosen]
    texts += [text for messages in conversations for message in messages for text in _texts(message)]
    texts += [SYSTEM, "tools: shell, submit", *["system\n", "user\n", "assistant\n", "tool\n"] * len(chosen)]
    return train_tokenizer(texts, vocab_size=vocab_size)


def pretrain_rows(config: RunConfig, problems: list[Any], tokenizer: Tokenizer) -> list[list[Document]]:
    """Return the batches of the pretraining stage: short sources first, then logs of the shell tool."""
    corpus = family_of(config).corpus
    renderer = ChatMLRenderer(tokenizer, RENDERER)
    random = Random(f"pretrain-{config.run.seed}")
    sources = [_plain(tokenizer, corpus.source(problem)) for problem in problems]
    logs = [_log(renderer, corpus.shell_log(problem)) for problem in problems]
    budget = config.pretrain.tokens
    batch = config.pretrain.batch_tokens
    short = _rows(sources, budget=int(budget * _SHORT_SHARE), batch_tokens=batch // 2, random=random)
    return short + _rows(logs, budget=int(budget * (1 - _SHORT_SHARE)), batch_tokens=batch, random=random)


def sft_rows(config: RunConfig, renderer: FamilyRenderer) -> list[list[Document]]:
    """Return the batches of the sft stage: demonstrations on training tasks, only their answers learned."""
    problems = training_problems(config)
    chosen = [problems[index % len(problems)] for index in range(config.sft.demonstrations)]
    trigger = config.harness.compaction.trigger_tokens

    def is_full(messages: list[Message]) -> bool:
        return 0 < trigger <= len(_conversation(renderer, messages).token_ids)

    demonstrations = family_of(config).corpus.demonstrations(
        chosen, seed=str(config.run.seed), good_share=config.sft.good_share, is_full=is_full
    )
    documents = [_conversation(renderer, messages) for messages in demonstrations]
    random = Random(f"sft-{config.run.seed}")
    return [
        row
        for _ in range(config.sft.epochs)
        for row in rows_of(documents, batch_tokens=config.sft.batch_tokens, random=random)
    ]


def _rows(documents: list[Document], *, budget: int, batch_tokens: int, random: Random) -> list[list[Document]]:
    """Return batches of about `budget` tokens in all, over as many epochs as that takes."""
    rows: list[list[Document]] = []
    tokens = 0
    while tokens < budget:
        for row in rows_of(documents, batch_tokens=batch_tokens, random=random):
            rows.append(row)
            tokens += sum(len(document.token_ids) for document in row)
            if tokens >= budget:
                break
    return rows


def _plain(tokenizer: Tokenizer, text: str) -> Document:
    ids = tokenizer.encode(text).ids
    return Document(ids, [True] * len(ids))


def _log(renderer: FamilyRenderer, messages: list[Message]) -> Document:
    """Return messages as the gateway renders them, all of it learned unless it is a conversation."""
    if messages[0]["role"] == "user":
        return _conversation(renderer, messages)
    ids = [token for part, _ in _turns(renderer, messages) for token in part]
    return Document(ids, [True] * len(ids))


def _conversation(renderer: FamilyRenderer, messages: list[Message]) -> Document:
    """Return a conversation exactly as the gateway renders it, its answers marked as learned."""
    ids = renderer.render([{"role": "system", "content": SYSTEM}, messages[0]], _TOOLS)
    learned = [False] * len(ids)
    for part, is_answer in _turns(renderer, messages[1:]):
        ids += part
        learned += [is_answer] * len(part)
    return Document(ids, learned)


def _turns(renderer: FamilyRenderer, messages: list[Message]) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of each answer, and of what is said between two of them, and whether they are an answer."""
    for is_answer, run in groupby(messages, lambda message: message["role"] == "assistant"):
        if is_answer:
            yield from ((renderer.answer(message), True) for message in run)
            continue
        tail = renderer.extend(list(run), finished=True)
        if tail is None:
            msg = "policy.renderer does not continue the demonstrations token by token; see etude gateway check"
            raise ConfigError(msg)
        yield tail, False


def _texts(message: Message) -> list[str]:
    calls = cast("list[dict[str, dict[str, str]]]", message.get("tool_calls", []))
    bodies = [
        f'{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}' for call in calls
    ]
    return [str(message["content"]), *bodies]
