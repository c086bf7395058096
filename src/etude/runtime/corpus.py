"""Text of a generated task family as documents for the pretrain and sft stages."""

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import cast

from tokenizers import Tokenizer

from etude.config import RunConfig
from etude.errors import ConfigError
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.renderers.family import FamilyRenderer
from etude.policy.tokenizer import train_tokenizer
from etude.runtime.task_sets import heldout_problems, training_problems
from etude.tasks import pyfix, pyfix_corpus
from etude.training.supervised import Document, rows_of

RENDERER = "chatml-compact"
_TOKENIZER_DOCUMENTS = 2000
_SHORT_SHARE = 0.18
"""Share of pretraining on short sources alone: attention learns to copy there before it is asked to look further."""

SYSTEM = "Do the task with the shell tool. Call submit when it is done."
_TOOLS = [{"type": "function", "function": {"name": name}} for name in ("shell", "submit")]


def corpus_problems(config: RunConfig) -> list[pyfix.Problem]:
    """Return problems to pretrain on; none shares a module's text with a held-out one."""
    if not config.tasks.family:
        msg = "there is no text to pretrain on: set tasks.family = 'pyfix', or start from a model with policy.path"
        raise ConfigError(msg)
    exclude = pyfix.texts_of(heldout_problems(config))
    return list(islice(pyfix.problems(f"corpus-{config.run.seed}", exclude=exclude), config.pretrain.documents))


def family_tokenizer(problems: list[pyfix.Problem], vocab_size: int) -> Tokenizer:
    """Return a tokenizer learned from sources and from conversations about them."""
    chosen = problems[:_TOKENIZER_DOCUMENTS]
    conversations = pyfix_corpus.demonstrations(chosen, seed="tokenizer", good_share=1.0)
    texts = [pyfix_corpus.source(problem) for problem in chosen]
    texts += [text for _, messages in conversations for message in messages for text in _texts(message)]
    texts += [SYSTEM, "tools: shell, submit", *["system\n", "user\n", "assistant\n", "tool\n"] * len(chosen)]
    return train_tokenizer(texts, vocab_size=vocab_size)


def pretrain_rows(config: RunConfig, problems: list[pyfix.Problem], tokenizer: Tokenizer) -> list[list[Document]]:
    """Return the batches of the pretraining stage: short sources first, then logs of the shell tool."""
    renderer = ChatMLRenderer(tokenizer, RENDERER)
    random = Random(f"pretrain-{config.run.seed}")
    sources = [_plain(tokenizer, pyfix_corpus.source(problem)) for problem in problems]
    logs = [_log(renderer, pyfix_corpus.shell_log(problem)) for problem in problems]
    budget = config.pretrain.tokens
    batch = config.pretrain.batch_tokens
    short = _rows(sources, budget=int(budget * _SHORT_SHARE), batch_tokens=batch // 2, random=random)
    return short + _rows(logs, budget=int(budget * (1 - _SHORT_SHARE)), batch_tokens=batch, random=random)


def sft_rows(config: RunConfig, renderer: FamilyRenderer) -> list[list[Document]]:
    """Return the batches of the sft stage: demonstrations on training tasks, only their answers learned."""
    if not config.tasks.family:
        msg = "there are no demonstrations: set tasks.family = 'pyfix', or leave sft out of stages"
        raise ConfigError(msg)
    problems = training_problems(config)
    chosen = [problems[index % len(problems)] for index in range(config.sft.demonstrations)]
    demonstrations = pyfix_corpus.demonstrations(chosen, seed=str(config.run.seed), good_share=config.sft.good_share)
    documents = [_conversation(renderer, messages) for _, messages in demonstrations]
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


def _log(renderer: FamilyRenderer, messages: list[pyfix_corpus.Message]) -> Document:
    """Return messages as the gateway renders them, all of it learned."""
    ids = [token for part, _ in _turns(renderer, messages) for token in part]
    return Document(ids, [True] * len(ids))


def _conversation(renderer: FamilyRenderer, messages: list[pyfix_corpus.Message]) -> Document:
    """Return a conversation exactly as the gateway renders it, its answers marked as learned."""
    ids = renderer.render([{"role": "system", "content": SYSTEM}, messages[0]], _TOOLS)
    learned = [False] * len(ids)
    for part, is_answer in _turns(renderer, messages[1:]):
        ids += part
        learned += [is_answer] * len(part)
    return Document(ids, learned)


def _turns(renderer: FamilyRenderer, messages: list[pyfix_corpus.Message]) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of each message, and whether they are an answer."""
    for message in messages:
        if message["role"] == "assistant":
            yield renderer.answer(message), True
        else:
            tail = renderer.extend([message], finished=True)
            if tail is None:
                msg = "policy.renderer does not continue the demonstrations token by token; see etude gateway check"
                raise ConfigError(msg)
            yield tail, False


def _texts(message: pyfix_corpus.Message) -> list[str]:
    calls = cast("list[dict[str, dict[str, str]]]", message.get("tool_calls", []))
    bodies = [
        f'{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}' for call in calls
    ]
    return [str(message["content"]), *bodies]
