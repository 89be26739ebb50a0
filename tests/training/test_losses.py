"""The losses, on numbers worked out by hand, against TRL's, and their gradients."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clew.algorithms import LOSSES, PRESETS, page
from clew.algorithms.kl import divergences, k1, k2, k3
from clew.algorithms.losses import PolicyLoss, TrainedTokens
from clew.algorithms.value_loss import value_loss
from clew.config import Algorithm, Config
from clew.errors import ConfigError, TrainingError
from clew.models.loading import load_model, load_value_model
from clew.training.batching import loss_weights
from clew.training.loss_function import loss_function
from clew.training.preferences import dpo_margins, preference_loss, sft_loss
from clew.training.scoring import Scores, ValueModel, score
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_config, make_sequence

LN = math.log
OPTIONS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "importance_cap": 2.0}


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([LN(p) for p in probabilities], dtype=torch.float64)


def policy_loss(**given: Any) -> PolicyLoss:
    """Return a built-in loss of tensors and options, by name."""
    tensors = {name: value for name, value in given.items() if name.endswith("_N")}
    options = Algorithm(**{name: value for name, value in given.items() if name not in tensors})
    return page(LOSSES[options.loss]).loss(TrainedTokens(**tensors), options)


def test_ratio_clip_and_weight_by_hand():
    # token          in the clip   above, A > 0   above, A < 0   below, A < 0   below, A > 0
    current = logs(0.5500, 0.7500, 0.7500, 0.2500, 0.2500)
    proximal = logs(0.5000, 0.5000, 0.5000, 0.5000, 0.5000)
    behaviour = logs(0.5000, 0.4000, 0.4000, 0.1000, 1.0000)
    advantages = torch.tensor([2.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    # ratio            1.1     1.5     1.5     0.5     0.5
    # weight           1       1.25    1.25    2 (5)   0.5
    expected = [-1 * 1.1 * 2, -1.25 * 1.3, 1.25 * 1.5, 2 * 0.8, -0.5 * 0.5]
    loss = policy_loss(
        logprobs_N=current, proximal_N=proximal, behaviour_N=behaviour, advantages_N=advantages, **OPTIONS
    )
    assert loss.per_token_N.tolist() == pytest.approx(expected)
    assert {name: float(value) for name, value in loss.sums.items()} == pytest.approx(
        {"clip_share": 2, "importance_weight": 1 + 1.25 + 1.25 + 2 + 0.5, "importance_capped_share": 1}
    )


def test_without_lag_it_is_grpo():
    old = logs(0.5, 0.4, 0.1)
    current = logs(0.55, 0.6, 0.05)
    advantages = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    loss = policy_loss(logprobs_N=current, proximal_N=old, behaviour_N=old, advantages_N=advantages, **OPTIONS)
    ratio = (current - old).exp()
    grpo = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    assert torch.equal(loss.per_token_N, grpo)


def test_k3_by_hand():
    assert k3(logs(0.5), logs(0.25)).tolist() == pytest.approx([0.5 - LN(0.5) - 1])
    assert k3(logs(0.5), logs(0.5)).tolist() == [0.0]
    options = OPTIONS | {"reference_N": logs(0.25), "kl_coef": 0.1}
    loss = policy_loss(
        logprobs_N=logs(0.5),
        proximal_N=logs(0.5),
        behaviour_N=logs(0.5),
        advantages_N=torch.tensor([3.0], dtype=torch.float64),
        **options,
    )
    kl = 0.5 - LN(0.5) - 1
    assert float(loss.per_token_N) == pytest.approx(-3 + 0.1 * kl)
    assert float(loss.sums["kl"]) == pytest.approx(kl)


def test_the_kl_term_times_the_ratio_by_hand():
    current = logs(0.6).requires_grad_()
    inputs: dict[str, Any] = {"logprobs_N": current, "proximal_N": logs(0.3), "behaviour_N": logs(0.3)}
    inputs |= {"advantages_N": torch.zeros(1, dtype=torch.float64), "reference_N": logs(0.3), "kl_coef": 0.1}
    k3 = 0.5 - LN(0.5) - 1
    loss = policy_loss(**inputs, kl_times_ratio=True, **OPTIONS)
    assert loss.per_token_N.tolist() == pytest.approx([0.1 * 2 * k3])
    assert float(loss.sums["kl"]) == pytest.approx(k3)
    (gradient,) = torch.autograd.grad(loss.per_token_N.sum(), current)
    assert float(gradient) == pytest.approx(0.1 * 2 * LN(2))  # ratio x log(p/q), as of KL(p || q)


def test_gradient_flows_through_the_current_logprobs_alone():
    torch.manual_seed(0)
    proximal, behaviour, reference = (-torch.rand(20, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(20, dtype=torch.float64)

    def total(current: Tensor) -> Tensor:
        return policy_loss(
            logprobs_N=current,
            proximal_N=proximal,
            behaviour_N=behaviour,
            advantages_N=advantages,
            reference_N=reference,
            kl_coef=0.3,
            **OPTIONS,
        ).per_token_N.sum()

    assert torch.autograd.gradcheck(total, -torch.rand(20, dtype=torch.float64).requires_grad_())


def test_at_the_start_of_a_step_the_gradient_is_the_policy_gradient():
    current = logs(0.5, 0.2).requires_grad_()
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    behaviour = logs(0.5, 0.4)
    policy_loss(
        logprobs_N=current, proximal_N=current.detach(), behaviour_N=behaviour, advantages_N=advantages, **OPTIONS
    ).per_token_N.sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-2.0, 0.5 * 3.0])  # -weight x advantage


def test_supervised_loss_is_cross_entropy():
    logits = torch.randn(5, 7)
    targets = torch.tensor([0, 3, 6, 2, 1])
    logprobs = logits.log_softmax(-1)[torch.arange(5), targets]
    expected = torch.nn.functional.cross_entropy(logits, targets)
    scores = Scores(logprobs_N=logprobs, entropies_N=torch.zeros(5))
    micro: Any = None  # nothing of it is needed
    torch.testing.assert_close(sft_loss(micro, scores).per_token_N.mean(), expected)


def test_value_loss_by_hand():
    #                     free   held above         held, but nearer   held, and further
    values = torch.tensor([1.1, 2.0, 2.0, -1.0], requires_grad=True)
    old = torch.tensor([1.0, 1.0, 1.0, 1.0])
    returns = torch.tensor([2.0, 1.0, 3.0, 2.0])
    # held at 1.2, 1.2, 0.8: of (1, 0.04), (1, 1.8^2), (9, 1.44) the larger counts
    loss = value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([0.81 / 2, 1 / 2, 1.8**2 / 2, 9 / 2])
    loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([-0.9, 1, 0, -3])
    assert value_loss(values, old, returns, None).tolist() == pytest.approx([0.81 / 2, 1 / 2, 1 / 2, 9 / 2])


def test_preference_losses_by_hand():
    chosen, rejected = torch.tensor([-3.0, -8.0], requires_grad=True), torch.tensor([-4.0, -2.0])
    # margins (-3 + 5) - (-4 + 4) = 2, (-8 + 7) - (-2 + 3) = -2; sigmoid(0.5 x 2) = 0.731059
    margins = dpo_margins(chosen, rejected, torch.tensor([-5.0, -7.0]), torch.tensor([-4.0, -3.0]), beta=0.5)
    loss = preference_loss(margins)
    assert loss.tolist() == pytest.approx([-LN(0.731059), -LN(0.268941)], rel=1e-5)
    loss.sum().backward()
    assert chosen.grad is not None and chosen.grad.tolist() == pytest.approx(
        [-0.5 * 0.268941, -0.5 * 0.731059], rel=1e-5
    )
    assert preference_loss(torch.tensor([1.0])).tolist() == pytest.approx([-LN(0.731059)], rel=1e-5)


def test_the_entropy_bonus_by_hand():
    one = logs(0.5)
    inputs: dict[str, Any] = {"logprobs_N": one, "proximal_N": one, "behaviour_N": one, "advantages_N": torch.ones(1)}
    loss = policy_loss(**inputs, entropies_N=torch.tensor([LN(2)]), entropy_coef=0.1, **OPTIONS)
    assert loss.per_token_N.tolist() == pytest.approx([-1 - 0.1 * LN(2)])


@pytest.mark.parametrize("logits_at_once", [None, 3])
def test_entropies_carry_their_exact_gradient_where_it_is_asked_for(logits_at_once: int | None):
    """dH/dz_i = -p_i (log p_i + H), through the temperature."""
    logits = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 4.0, 0.5], [9.0, 9.0, 9.0]], requires_grad=True)

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 3, bias=False)
            torch.nn.init.eye_(self.head.weight)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            return SimpleNamespace(logits=self.head(logits[None]))

    where: dict[str, Any] = {"rows_N": torch.zeros(3, dtype=torch.int64), "columns_N": torch.arange(1, 4)}
    ids, temperatures = torch.tensor([[0, 1, 2, 0]]), torch.tensor([1.0, 0.5, 2.0])
    scores = score(Fixed(), ids, **where, temperatures_N=temperatures, max_logits=logits_at_once, entropy_gradient=True)
    (gradient,) = torch.autograd.grad(scores.entropies_N.sum(), logits)
    with torch.no_grad():
        logprobs = (logits[:3] / temperatures[:, None]).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1, keepdim=True)
        expected = -logprobs.exp() * (logprobs + entropy) / temperatures[:, None]
    torch.testing.assert_close(scores.entropies_N, entropy[:, 0])
    torch.testing.assert_close(gradient[:3], expected)
    assert not gradient[3].any()
    assert not score(Fixed(), ids, **where, temperatures_N=temperatures).entropies_N.requires_grad


def test_one_ratio_a_sequence_by_hand():
    """GSPO: the geometric mean of the tokens' ratios; each token gets the sequence's gradient."""
    rows = torch.tensor([0, 0, 1])
    old = logs(0.5, 0.5, 0.5)
    current = logs(0.5 * 1.21, 0.5, 0.25).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
    inputs: dict[str, Any] = {"logprobs_N": current, "proximal_N": old, "behaviour_N": old, "advantages_N": advantages}
    wide: dict[str, Any] = OPTIONS | {"clip_low": 0.9}
    loss = policy_loss(**inputs, **wide, rows_N=rows, ratio="sequence").per_token_N
    assert loss.tolist() == pytest.approx([-1.1, -1.1, 2 * 0.5])
    (loss.sum() / 3).backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-1.1 / 3, -1.1 / 3, 2 * 0.5 / 3])  # tokens with a ratio of 1, too
    clipped = policy_loss(**inputs, **OPTIONS, rows_N=rows, ratio="sequence").per_token_N
    assert clipped.tolist() == pytest.approx([-1.1, -1.1, 2 * 0.8])


def test_cispo_by_hand():
    """No gradient is lost to the clip: the clipped ratio is a constant beside the logprob."""
    current = logs(0.6, 0.1, 0.5).requires_grad_()
    old = logs(0.3, 0.4, 0.5)  # ratios 2, 1/4, 1
    behaviour = logs(0.3, 0.8, 0.5)  # weights 1, 1/2, 1
    advantages = torch.tensor([2.0, 1.0, -1.0], dtype=torch.float64)
    loss = policy_loss(
        logprobs_N=current, proximal_N=old, behaviour_N=behaviour, advantages_N=advantages, loss="cispo", **OPTIONS
    ).per_token_N
    assert loss.tolist() == pytest.approx([-1.3 * 2 * LN(0.6), -0.5 * 0.8 * LN(0.1), LN(0.5)])
    loss.sum().backward()
    assert current.grad is not None and current.grad.tolist() == pytest.approx([-2.6, -0.4, 1.0])


def test_dual_clip_by_hand():
    """A ratio of 5, a negative advantage: clip lets it be; dual clip holds the loss at 3 x |A|, without gradient."""
    current, old = logs(0.5, 0.5, 0.12).requires_grad_(), logs(0.1, 0.1, 0.1)
    advantages = torch.tensor([-2.0, 2.0, -2.0], dtype=torch.float64)
    inputs: dict[str, Any] = {"logprobs_N": current, "proximal_N": old, "behaviour_N": old, "advantages_N": advantages}
    assert policy_loss(**inputs, **OPTIONS).per_token_N.tolist() == pytest.approx([10, -2.6, 2.4])
    loss = policy_loss(**inputs, **OPTIONS, dual_clip=3.0).per_token_N
    assert loss.tolist() == pytest.approx([6, -2.6, 2.4])
    loss.sum().backward()
    assert current.grad is not None and current.grad.tolist() == pytest.approx([0, 0, 2.4])


@pytest.mark.parametrize(
    ("importance", "weights", "capped"),
    [
        ("token_truncate", [0.4, 1.5, 2, 1], 1),
        ("token_mask", [0, 1.5, 0, 1], 2),  # outside [1/2, 2]
        ("sequence_truncate", [0.6, 0.6, 2, 2], 2),  # 0.4 x 1.5, 3 x 1
        ("sequence_mask", [0.6, 0.6, 0, 0], 2),
    ],
)
def test_importance_weights_by_hand(importance: str, weights: list[float], capped: int):
    behaviour = logs(0.5, 0.4, 0.2, 0.3)
    proximal = logs(0.2, 0.6, 0.6, 0.3)
    loss = policy_loss(
        logprobs_N=proximal,
        proximal_N=proximal,
        behaviour_N=behaviour,
        advantages_N=torch.ones(4, dtype=torch.float64),
        rows_N=torch.tensor([0, 0, 1, 1]),
        importance=importance,
        **OPTIONS,
    )
    assert loss.per_token_N.tolist() == pytest.approx([-weight for weight in weights])
    assert float(loss.sums["importance_capped_share"]) == capped
    assert float(loss.sums["importance_weight"]) == pytest.approx(sum(weights))


def test_a_mask_does_not_hide_nan():
    nan = torch.tensor([math.nan])
    inputs = {"logprobs_N": nan, "proximal_N": nan, "behaviour_N": nan, "advantages_N": nan}
    assert policy_loss(**inputs, **OPTIONS, importance="token_mask").per_token_N.isnan().all()


def test_k1_and_k2_by_hand():
    current = logs(0.5).requires_grad_()
    assert k1(current, logs(0.25)).tolist() == pytest.approx([LN(2)])
    assert k2(current, logs(0.25)).tolist() == pytest.approx([LN(2) ** 2 / 2])
    for estimator, gradient in (("k1", 1), ("k2", LN(2)), ("k3", 1 - 0.5)):
        advantage = torch.zeros(1, dtype=torch.float64)
        one = current.detach()
        loss = policy_loss(
            logprobs_N=current,
            proximal_N=one,
            behaviour_N=one,
            advantages_N=advantage,
            reference_N=logs(0.25),
            kl_coef=0.5,
            kl_estimator=estimator,
            **OPTIONS,
        ).per_token_N
        (grad,) = torch.autograd.grad(loss.sum(), current)
        assert float(grad) == pytest.approx(0.5 * gradient)


def test_gspo_lets_go_of_a_sequence_that_has_become_unlikely():
    """Under lag: since it was sampled, one of its tokens has become 1e4 times less likely, the others have not."""
    current = logs(1e-5, 0.5, 0.5, 0.5).requires_grad_()
    behaviour = logs(0.1, 0.5, 0.5, 0.5)
    algorithm = make_config("unused", algorithm={"preset": "gspo"}).algorithm
    tokens = TrainedTokens(
        logprobs_N=current,
        proximal_N=current.detach(),
        behaviour_N=behaviour,
        advantages_N=torch.full((4,), -1.0, dtype=torch.float64),
        rows_N=torch.zeros(4, dtype=torch.int64),
    )
    loss = loss_function(algorithm)(tokens)
    (gradient,) = torch.autograd.grad(loss.per_token_N.mean(), current)
    # weights of tokens would give 3/4 of a fresh sequence's gradient to each of them, the unlikely one included
    assert gradient.tolist() == pytest.approx([1e-4 / 4] * 4)


@pytest.mark.parametrize("apart", [89.0, 700.0, -89.0, -700.0])
@pytest.mark.parametrize("options", [{}, {"ratio": "sequence"}, {"loss": "cispo"}, {"dual_clip": 3.0}])
@pytest.mark.parametrize("importance", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_probabilities_however_far_apart_give_a_finite_loss_and_gradient(
    apart: float, options: dict[str, Any], importance: str, estimator: str
):
    """float32 overflows above e^88.7, and infinity times an advantage of 0 is NaN."""
    for far in ("proximal_N", "behaviour_N", "reference_N"):
        inputs = {name: torch.full((3,), -1.0) for name in ("proximal_N", "behaviour_N", "reference_N")}
        inputs[far] -= apart
        current = torch.full((3,), -1.0, requires_grad=True)
        loss = policy_loss(
            logprobs_N=current,
            advantages_N=torch.tensor([0.0, 2.0, -2.0]),
            rows_N=torch.arange(3),
            importance=importance,
            kl_coef=0.1,
            kl_estimator=estimator,
            **inputs,
            **OPTIONS,
            **options,
        )
        (gradient,) = torch.autograd.grad(loss.per_token_N.sum(), current)
        assert loss.per_token_N.isfinite().all() and gradient.isfinite().all(), far
        assert all(math.isfinite(value) for value in loss.sums.values())
        others = divergences(current.detach().numpy(), inputs["reference_N"].numpy(), estimator)
        assert others.tolist() == pytest.approx((loss.sums["kl"] / 3).expand(3).tolist(), rel=1e-6)


def test_a_ratio_within_the_limit_is_left_as_it_is_to_the_last_bit():
    torch.manual_seed(0)
    proximal = -3 * torch.rand(10_000)
    start = proximal + 4 * torch.randn(10_000)
    advantages, weight = torch.randn(10_000), torch.exp(proximal - start / 2).clamp(max=2)

    def gradient(loss: Any) -> tuple[Tensor, Tensor]:
        current = start.clone().requires_grad_()
        values = loss(current)
        return values, torch.autograd.grad(values.sum(), current)[0]

    def ours(current: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"proximal_N": proximal, "behaviour_N": start / 2, "advantages_N": advantages}
        return policy_loss(logprobs_N=current, **inputs, **OPTIONS).per_token_N

    def unlimited(current: Tensor) -> Tensor:
        ratio = torch.exp(current - proximal)
        return -weight * torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.3) * advantages)

    for found, expected in zip(gradient(ours), gradient(unlimited), strict=True):
        assert torch.equal(found, expected)


def test_k3_of_nearly_equal_probabilities_is_not_noise():
    torch.manual_seed(0)
    differences = 1e-4 * torch.randn(1_000_000)
    exact = float((torch.expm1(differences.double()) - differences.double()).mean())
    found = k3(torch.zeros(1_000_000), differences)
    assert exact == pytest.approx(5e-9, rel=0.01)
    assert float(found.mean()) == pytest.approx(exact, rel=1e-3) and float(found.min()) >= 0
    tiny = 1e-9 * np.random.default_rng(0).normal(size=1_000_000)  # where float64 is noise, too
    assert divergences(np.zeros(1_000_000), tiny, "k3").mean() == pytest.approx(5e-19, rel=0.01)


def test_clip_share_counts_every_token_that_a_bound_holds():
    def share(current: float, advantage: float, **options: Any) -> float:
        return float(
            policy_loss(
                logprobs_N=logs(current),
                proximal_N=logs(0.1),
                behaviour_N=logs(0.1),
                advantages_N=torch.tensor([advantage], dtype=torch.float64),
                **OPTIONS | options,
            ).sums["clip_share"]
        )

    for above, below in ((1.0, 0.0), (-1.0, 1.0)):  # clip: of an advantage's sign, only one side is clipped
        assert share(0.5, above) == max(above, 0) and share(0.01, above) == below
    for advantage in (1.0, -1.0):  # CISPO's ratio is clipped whatever the advantage
        assert share(0.5, advantage, loss="cispo") == share(0.01, advantage, loss="cispo") == 1
        assert share(0.11, advantage, loss="cispo") == 0
    assert share(0.5, 0.0, loss="cispo") == share(0.5, 0.0) == 0  # nothing is held where nothing pulls
    assert share(0.5, -1.0, dual_clip=3.0) == 1 and share(0.25, -1.0, dual_clip=3.0) == 0
    assert share(0.01, -1.0, dual_clip=3.0) == 1 and share(0.5, 1.0, dual_clip=3.0) == 1


# The user's own ------------------------------------------------------------------------------------------------------


def plain(logprobs_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return -logprobs_N * advantages_N, {"sign": advantages_N.sign(), "half": 0.5}


def relative(tokens: TrainedTokens, options: Algorithm, clip_high: float, **_: Any) -> PolicyLoss:
    return page("ppo").loss(tokens, options.model_copy(update={"clip_high": 2 * clip_high}))


def scalar(logprobs_N: Tensor, **_: Any) -> Any:
    return logprobs_N.mean(), {}


def bare(logprobs_N: Tensor) -> Any:
    return logprobs_N


def detached(logprobs_N: Tensor, advantages_N: Tensor) -> Any:
    return logprobs_N.detach() * advantages_N, {}


def mutating(logprobs_N: Tensor, advantages_N: Tensor) -> Any:
    return logprobs_N * advantages_N.mul_(2), {}


def raising(logprobs_N: Tensor) -> Any:
    raise KeyError("what")


def distance(logprobs_N: Tensor, reference_N: Tensor, entropies_N: Tensor | None = None) -> Any:
    return logprobs_N - reference_N, {}


def odd_metric(logprobs_N: Tensor) -> Any:
    return logprobs_N, {"odd": torch.ones(7)}


def constant(logprobs_N: Tensor) -> Any:
    return torch.zeros_like(logprobs_N, requires_grad=True), {}


def complex_loss(logprobs_N: Tensor) -> Any:
    return logprobs_N + 1j, {}


def number(logprobs_N: Tensor) -> Any:
    return 1.0, {}


def leaving(logprobs_N: Tensor) -> Any:
    raise SystemExit(4)


def misnamed(logprob_N: Tensor) -> Any:
    return logprob_N, {}


def vector(logprobs_N: Tensor) -> Any:
    return PolicyLoss(per_token_N=-logprobs_N, sums={"share": torch.ones(3)})


def text_sum(logprobs_N: Tensor) -> Any:
    text: Any = "half"
    return PolicyLoss(per_token_N=-logprobs_N, sums={"share": text})


def second_loss(logprobs_N: Tensor) -> Any:
    return PolicyLoss(per_token_N=-logprobs_N, sums={"loss": torch.ones(())})


def custom(name: str) -> Any:
    config = make_config("unused", algorithm={"loss": f"tests.training.test_losses.{name}"})
    return loss_function(config.algorithm)


def inputs_of(*probabilities: float) -> dict[str, Tensor]:
    current, advantages = logs(*probabilities), torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    return {
        "logprobs_N": current.requires_grad_(),
        "proximal_N": current.detach().clone(),
        "behaviour_N": current.detach().clone(),
        "advantages_N": advantages,
        "rows_N": torch.tensor([0, 0, 1]),
    }


def test_a_loss_of_the_users_own():
    loss = custom("plain")(TrainedTokens(**inputs_of(0.5, 0.25, 0.1)))
    assert loss.per_token_N.tolist() == pytest.approx([-LN(0.5), 2 * LN(0.25), 0])
    assert {name: float(value) for name, value in loss.sums.items()} == {"loss/sign": 0, "loss/half": 1.5}
    theirs = custom("relative")(TrainedTokens(**inputs_of(0.5, 0.25, 0.1)))
    assert theirs.per_token_N.tolist() == [-1, 2, 0] and "clip_share" in theirs.sums


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("scalar", TrainingError, r"returned a loss of shape \[\]; expected \[3\]: one per token"),
        ("bare", TrainingError, r"returned Tensor; expected \(loss_N, metrics\)"),
        ("detached", TrainingError, "returned a loss without a gradient"),
        ("mutating", TrainingError, r"changed its input in place \(advantages_N\)"),
        ("raising", TrainingError, r"raising raised KeyError in .*test_losses.py:\d+: 'what'"),
        ("constant", TrainingError, "returned a loss without a gradient: it does not depend on logprobs_N"),
        ("complex_loss", TrainingError, r"returned a loss of torch\.complex\d+; expected"),
        ("number", TrainingError, r"returned tuple \(float, dict\); expected \(loss_N, metrics\)"),
        ("leaving", TrainingError, r"raised SystemExit in .*test_losses.py:\d+: 4"),
        ("distance", TrainingError, "raised TypeError in .*reference_N is None without algorithm.kl_coef"),
        ("odd_metric", TrainingError, r"metric 'odd' as Tensor \[7\]; expected a number, or a tensor of shape \[3\]"),
        ("vector", TrainingError, r"returned sums\['share'\]; expected one number"),
        ("text_sum", TrainingError, r"returned sums\['share'\]; expected one number"),
        ("second_loss", TrainingError, r"returned sums\['loss'\]; expected .* another name than loss"),
        (
            "misnamed",
            ConfigError,
            r"'logprob_N', and a loss is given logprobs_N, .* Did you mean 'logprobs_N'",
        ),
        ("nothing", ConfigError, "has no 'nothing'"),
        ("LN.x", ConfigError, "there is no module|is a module, not a package"),
        ("OPTIONS", ConfigError, "expected a function"),
    ],
)
def test_what_cannot_be_a_loss_is_told(name: str, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        custom(name)(TrainedTokens(**inputs_of(0.5, 0.25, 0.1), reference_N=None))


# TRL -----------------------------------------------------------------------------------------------------------------


def trl_trainer(folder: Path, kind: str, **arguments: Any) -> Any:
    import trl
    from datasets import Dataset

    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(folder),
        args=getattr(trl, f"{kind}Config")(
            output_dir=str(folder / "out"),
            num_generations=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            bf16=False,
            use_cpu=True,
            report_to=[],
            max_completion_length=16,
            **arguments,
        ),
        reward_funcs=lambda **_: [0.0],
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.eval()
    return trainer


class Case:
    """Four sequences of 7, 3, 5 and 1 trained tokens, under random logprobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_tokenizer(folder)
        tiny_model(folder, scale=0.1)
        torch.manual_seed(0)
        self.prompts, self.completions = torch.randint(6, 90, (4, 5)), torch.randint(6, 90, (4, 7))
        self.mask = torch.arange(7) < torch.tensor([7, 3, 5, 1])[:, None]
        self.rows, self.columns = self.mask.nonzero(as_tuple=True)
        self.advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
        self.reference = self.current().detach() + 0.5 * torch.randn(4, 7)
        self.old = self.current().detach() + 0.5 * torch.randn(4, 7)

    def scores(self, model: Any) -> Scores:
        """Return the scores of the 16 trained tokens under the weights."""
        ids, ones_N = torch.cat([self.prompts, self.completions], 1), torch.ones(len(self.rows))
        return score(model, ids, self.rows, self.columns + 5, ones_N, entropy_gradient=True)

    def current(self) -> Tensor:
        """[4, 7] logprobs under the weights; 0 where masked."""
        scores = self.scores(load_model(str(self.folder), "float32", torch.device("cpu")))
        return torch.zeros(4, 7).index_put((self.rows, self.columns), scores.logprobs_N)

    def theirs(self, trainer: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Loss, and gradient of the embedding."""
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": self.prompts,
                "prompt_mask": torch.ones_like(self.prompts),
                "completion_ids": self.completions,
                "completion_mask": self.mask.long(),
                "advantages": self.advantages,
                "old_per_token_logps": self.old,
                "ref_per_token_logps": self.reference,
                "num_items_in_batch": self.mask.sum(),
                **more,
            },
        )
        loss.backward()
        return loss.detach(), trainer.model.get_input_embeddings().weight.grad

    def ours(self, options: dict[str, Any], behaviour: Tensor | None = None) -> tuple[Tensor, Tensor]:
        algorithm = make_config(self.folder, sampling={"max_new_tokens": 16}, algorithm=options).algorithm
        model: Any = load_model(str(self.folder), "float32", torch.device("cpu"))
        scores = self.scores(model)
        tokens = TrainedTokens(
            logprobs_N=scores.logprobs_N,
            proximal_N=self.old[self.mask],
            behaviour_N=(self.old if behaviour is None else behaviour)[self.mask],
            advantages_N=self.advantages[self.rows],
            reference_N=self.reference[self.mask] if algorithm.kl_coef else None,
            entropies_N=scores.entropies_N if algorithm.entropy_coef else None,
            rows_N=self.rows,
        )
        loss_N = loss_function(algorithm)(tokens).per_token_N
        batch = [make_sequence(f"g0.e{i}.s0", response=int(self.mask[i].sum())) for i in range(4)]
        weights = loss_weights(batch, [[[0, 2], [3, 1]]], algorithm)
        loss = (loss_N if weights is None else loss_N * torch.from_numpy(weights)[self.rows]).mean()
        loss.backward()
        gradient = model.get_input_embeddings().weight.grad
        assert gradient is not None and gradient.abs().max() > 1e-4
        return loss.detach(), gradient


CLIP = {"epsilon": 0.2, "epsilon_high": 0.3}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"loss_type": "bnpo", **CLIP}, {"clip_high": 0.3}),
        ({"loss_type": "bnpo", "beta": 0.07, **CLIP}, {"clip_high": 0.3, "kl_coef": 0.07}),
        (
            {"loss_type": "bnpo", "beta": 0.07, "use_bias_correction_kl": True, **CLIP},
            {"clip_high": 0.3, "kl_coef": 0.07, "kl_times_ratio": True},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True},
            {"ratio": "sequence", "loss_mean": "sequence", "kl_coef": 0.1, "kl_times_ratio": True},
        ),
        ({"loss_type": "grpo", "beta": 0.04}, {"preset": "grpo"}),
        ({"loss_type": "dr_grpo"}, {"preset": "dr_grpo"}),
        ({"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}, {"preset": "dapo"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"preset": "cispo"}),
        (
            {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.05},
            {"preset": "cispo", "clip_high": 0.1, "kl_coef": 0.05},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {"preset": "gspo"},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, **CLIP},
            {"ratio": "sequence", "loss_mean": "sequence", "clip_high": 0.3, "kl_coef": 0.1},
        ),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence", **CLIP},
            {"ratio": "sequence", "loss_mean": "constant", "loss_constant": 1, "clip_high": 0.3},
        ),
        ({"loss_type": "bnpo", "entropy_coef": 0.1, **CLIP}, {"clip_high": 0.3, "entropy_coef": 0.1}),
        ({"loss_type": "dapo", "delta": 1.4, **CLIP}, {"clip_high": 0.3, "dual_clip": 1.4}),
    ],
)
def test_equals_the_loss_of_trl_and_its_gradient(tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any]):
    case = Case(tmp_path)
    # use_bias_correction_kl: its k3 is weighted by the ratio otherwise
    trainer = trl_trainer(tmp_path, "GRPO", **{"beta": 0.0, "use_bias_correction_kl": False, **arguments})
    for ours, theirs in zip(case.ours(options), case.theirs(trainer), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("importance", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_equal_trl_s(tmp_path: Path, importance: str):
    """TIS and MIS. TRL computes the weights between generation and loss, as here: nan_to_num and logging left away."""
    case = Case(tmp_path)
    behaviour = case.old + (0.2 if importance.startswith("sequence") else 0.4) * torch.randn(4, 7)
    log_weight = (case.old - behaviour) * case.mask
    weight = torch.exp(log_weight.sum(-1, keepdim=True) if importance.startswith("sequence") else log_weight)
    outside = (weight < 1 / 1.5) | (weight > 1.5)
    assert outside.any() and not outside.all()
    weight = weight.clamp(max=1.5) if importance.endswith("truncate") else weight.masked_fill(outside, 0.0)
    trainer = trl_trainer(tmp_path, "GRPO", loss_type="dapo", beta=0.0)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    found = case.ours({"importance": importance, "importance_cap": 1.5}, behaviour)
    for ours, theirs in zip(found, case.theirs(trainer, importance_sampling_ratio=weight), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_rloo_has_the_gradient_of_trl(tmp_path: Path):
    """On policy, where TRL's ratio of whole sequences and the sum over tokens have one gradient."""
    case = Case(tmp_path)
    case.old = case.current().detach()
    trainer = trl_trainer(tmp_path, "RLOO", beta=0.0)
    _, theirs = case.theirs(trainer, old_logps=case.old.sum(1))
    _, ours = case.ours({"preset": "rloo"})
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def preference_trainer(case: Case, kind: str, **arguments: Any) -> Any:
    import trl
    from datasets import Dataset

    rows = [{"prompt": "1+", "chosen": "2", "rejected": "3"}]
    arguments |= {"output_dir": str(case.folder / "out"), "bf16": False, "use_cpu": True, "report_to": []}
    return getattr(trl, f"{kind}Trainer")(
        model=str(case.folder),
        args=getattr(trl, f"{kind}Config")(per_device_train_batch_size=2, gradient_accumulation_steps=1, **arguments),
        train_dataset=Dataset.from_list(rows),
    )


@pytest.mark.filterwarnings("ignore")
def test_dpo_equals_trl_s_loss_and_gradient(tmp_path: Path):
    """Rows 0 and 1 are preferred to rows 2 and 3; the reference is the model before it was nudged."""
    case = Case(tmp_path)
    trainer = preference_trainer(case, "DPO", beta=0.3, disable_dropout=True)
    model: Any = load_model(str(tmp_path), "float32", torch.device("cpu"))
    sums = torch.zeros(4).index_add(0, case.rows, case.scores(model).logprobs_N.detach())
    with torch.no_grad():
        for each in (model, trainer.model):
            torch.manual_seed(3)
            for parameter in each.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    ids = torch.cat([case.prompts, case.completions], 1)
    mask = torch.cat([torch.zeros(4, 5, dtype=torch.int64), case.mask.long()], 1)
    attention = torch.cat([torch.ones(4, 5, dtype=torch.int64), case.mask.long()], 1)
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}
    theirs = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    theirs.backward()
    now = torch.zeros(4).index_add(0, case.rows, case.scores(model).logprobs_N)
    ours = preference_loss(dpo_margins(now[:2], now[2:], sums[:2], sums[2:], beta=0.3)).mean()
    ours.backward()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = [each.get_input_embeddings().weight.grad for each in (model, trainer.model)]
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_reward_model_s_loss_equals_trl_s_and_its_gradient(tmp_path: Path):
    case = Case(tmp_path)
    inner = load_value_model(str(tmp_path), "float32", torch.device("cpu"), "model.path")
    torch.nn.init.normal_(inner.get_parameter("score.weight"))
    tiny_tokenizer(tmp_path / "rm")
    inner.save_pretrained(tmp_path / "rm")
    case.folder = tmp_path / "rm"
    trainer = preference_trainer(case, "Reward", disable_dropout=True)
    trainer.model.eval()
    ids = torch.cat([case.prompts, case.completions], 1)
    attention = torch.cat([torch.ones(4, 5, dtype=torch.int64), case.mask.long()], 1)
    padded = ids.masked_fill(attention == 0, 0)
    theirs = trainer.compute_loss(trainer.model, {"input_ids": padded, "attention_mask": attention})
    theirs.backward()
    last = attention.sum(1) - 1
    scores = ValueModel(inner)(ids, torch.arange(4), last)
    ours = preference_loss(scores[:2] - scores[2:]).mean()
    ours.backward()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    models: list[Any] = [inner, trainer.model]
    gradients = [each.get_input_embeddings().weight.grad for each in models]
    assert gradients[0].abs().max() > 1e-4
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_means_by_hand():
    """Tokens 4, 2 | 3 and 1, in two mini-batches; what the losses of a token are multiplied with."""
    names = [f"g0.e{i}.s0" for i in range(5)]
    batch = [make_sequence(name, response=length) for name, length in zip(names, (4, 2, 3, 0, 1), strict=True)]
    plan = [[[0], [1]], [[2, 3], [4]]]

    def weights(**options: Any) -> list[float] | None:
        sections: dict[str, Any] = {"experiment": "x", "model": {"path": "x"}, "data": {"path": "x"}}
        algorithm = Config.model_validate(sections | {"algorithm": options}).algorithm
        found = loss_weights(batch, plan, algorithm)
        return None if found is None else found.tolist()

    assert weights() is None
    # times 1/6 and 1/4 (the mean over tokens): 1/2 x 1/4, 1/2 x 1/2 | 1/2 x 1/3, 1/2 x 1
    assert weights(loss_mean="sequence") == pytest.approx([6 / 8, 6 / 4, 4 / 6, 0, 4 / 2])
    assert weights(loss_mean="constant", loss_constant=10) == pytest.approx([6 / 20, 6 / 20, 4 / 20, 0, 4 / 20])
    object.__setattr__(batch[0], "finish_reason", "length")
    assert weights(overlong_filter=True) == pytest.approx([0, 6 / 2, 1, 0, 1])
    assert weights(overlong_filter=True, loss_mean="sequence") == pytest.approx([0, 6 / 2, 4 / 6, 0, 4 / 2])
    object.__setattr__(batch[1], "finish_reason", "length")
    assert weights(overlong_filter=True, loss_mean="constant") == pytest.approx([0, 0, 4 / 512, 0, 4 / 512])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_computes_a_loss(preset: str):
    inputs = inputs_of(0.5, 0.25, 0.1)
    algorithm = make_config("unused", algorithm={"preset": preset}).algorithm
    loss = loss_function(algorithm)(TrainedTokens(**inputs, reference_N=inputs["proximal_N"]))
    assert loss.per_token_N.isfinite().all() and loss.per_token_N.requires_grad
