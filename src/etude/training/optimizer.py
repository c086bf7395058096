"""AdamW on the decoder's own fp32 parameters, which are the master weights."""

import torch
from torch import Tensor

from etude.errors import PolicyError, RunError, StoreError
from etude.learning_config import TrainerSection
from etude.policy.decoder import Decoder

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def learning_rate(config: TrainerSection, step: int) -> float:
    """Return the learning rate of the update that makes optimizer step `step`, counted from 1."""
    warm = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    done = min(1.0, (step - 1) / max(1, config.steps - 1))
    return config.lr * warm * (1.0 - (1.0 - config.final_lr_share) * done)


class Optimizer:
    """Turns summed gradients into one update of the weights."""

    def __init__(self, decoder: Decoder, config: TrainerSection) -> None:
        if decoder.embed.dtype is not torch.float32:
            msg = f"master weights must be float32, not {decoder.embed.dtype}; load the policy with torch.float32"
            raise PolicyError(msg)
        self._parameters = dict(decoder.named_parameters())
        self._config = config
        matrices = [parameter for parameter in self._parameters.values() if parameter.ndim > 1]
        vectors = [parameter for parameter in self._parameters.values() if parameter.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                # Norms and biases have no direction to shrink.
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of the update that makes optimizer step `step`, counted from 1."""
        return learning_rate(self._config, step)

    def update(self, *, step: int, divisor: float) -> float:
        """Divide the gradients, clip them to the configured norm, step, and clear them; return the norm before.

        Raises:
            RunError: The gradient is not finite; the weights are as they were.
        """
        for parameter in self._parameters.values():
            # Without signal the gradient is zero and the moments decay: every step is one, whatever was skipped.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.div_(divisor)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip)
        if not bool(norm.isfinite()):
            self.clear()
            raise RunError(f"the gradient of step {step} is not finite; lower trainer.lr and resume")
        for group in self._adamw.param_groups:
            group["lr"] = self.rate(step)
        self._adamw.step()  # pyright: ignore[reportUnknownMemberType]
        self.clear()
        return norm.item()

    def clear(self) -> None:
        """Forget gradients that were accumulated."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the moments by parameter name; empty before the first update."""
        return {
            f"{name}.{moment}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in _MOMENTS
            if moment in self._adamw.state[parameter]
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the moments of `state`; raise `StoreError` when they are another network's."""
        self._adamw.state.clear()
        if not state:
            return
        wanted = {f"{name}.{moment}" for name in self._parameters for moment in _MOMENTS}
        if set(state) != wanted:
            odd = ", ".join(sorted(set(state) ^ wanted)[:3])
            raise StoreError(f"the checkpoint's optimizer state is another network's (such as {odd})")
        for name, parameter in self._parameters.items():
            moments = {moment: state[f"{name}.{moment}"] for moment in _MOMENTS}
            if any(moments[moment].shape != parameter.shape for moment in _MOMENTS[:2]):
                raise StoreError(f"the checkpoint's optimizer state of {name} has another shape than the policy")
            self._adamw.state[parameter] = moments
