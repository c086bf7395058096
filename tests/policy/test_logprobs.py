# pyright: basic
import torch

from etude.policy.logprobs import chunks, support_logits, support_rows


def support_of(tokens, vocab, width, generator):
    rows = [torch.randperm(vocab, generator=generator)[:width].sort().values for _ in range(tokens)]
    support = torch.stack(rows)
    support[::2, width // 2 :] = -1
    return support


def test_logits_of_a_support_are_those_of_the_whole_vocabulary():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 8, generator=generator)
    for vocab in (12, 5000):
        head = torch.randn(vocab, 8, generator=generator)
        support = support_of(10, vocab, 6, generator)
        rows, columns = support_rows(head, support)
        assert len(rows) == vocab or len(rows) <= 60
        found = support_logits(hidden, rows, columns)
        full = hidden @ head.T
        expected = full.gather(1, support.clamp(min=0)).masked_fill(support < 0, -torch.inf)
        torch.testing.assert_close(found, expected)


def test_gradients_through_the_used_rows_reach_the_head():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 8, generator=generator)
    head = torch.randn(300, 8, generator=generator).requires_grad_()
    support = torch.tensor([[3, 7], [7, 9], [3, -1], [250, 299]])
    rows, columns = support_rows(head, support)
    logits = support_logits(hidden, rows, columns)
    logits.masked_fill(logits.isneginf(), 0.0).sum().backward()
    expected = torch.zeros(300, 8)
    for row, ids in enumerate(support.tolist()):
        for token in ids:
            if token >= 0:
                expected[token] += hidden[row]
    torch.testing.assert_close(head.grad, expected)


def test_chunks_cover_every_token_once_and_bound_the_logits():
    for columns in (8, 50_000, 1_000_000_000):
        parts = list(chunks(1000, columns))
        assert [index for part in parts for index in range(part.start, part.stop)] == list(range(1000))
        assert all((part.stop - part.start) * columns <= max(1 << 23, 16 * columns) for part in parts)
    assert list(chunks(0, 8)) == []
