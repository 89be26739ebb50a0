"""Rejection of tokens and sequences: numbers worked out by hand, and the published masks that it reproduces."""

import ast
import inspect
import math
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clew.algorithms.losses import TrainedTokens
from clew.algorithms.rejection import rejections
from clew.config import Algorithm
from clew.training.engine import TrainEngine
from clew.training.loss_function import loss_function
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_batch, make_config
from tests.training.test_losses import Case, logs, trl_trainer

LN = math.log


def algorithm(**options: Any) -> Algorithm:
    return Algorithm(**options)


def tokens_of(proximal: Tensor, behaviour: Tensor, rows: list[int]) -> dict[str, Any]:
    """Return the inputs of a loss, at the start of a step."""
    return {
        "logprobs_N": proximal.clone().requires_grad_(),
        "proximal_N": proximal,
        "behaviour_N": behaviour,
        "advantages_N": torch.ones_like(proximal),
        "rows_N": torch.tensor(rows),
    }


def reasons(inputs: dict[str, Any], **options: Any) -> list[float]:
    loss = loss_function(algorithm(**options))(TrainedTokens(**inputs))
    assert loss.rejected_N is not None and loss.rejected_N.dtype == torch.float32
    return loss.rejected_N.tolist()


#                    w    0.4  1.5 | 3    1
#   w - log w - 1        0.316 0.095 | 0.901 0
#   of the sequence: product 0.6 | 3, geometric mean 0.775 | 1.732, mean of k3 0.205 | 0.451
@pytest.mark.parametrize(
    ("reject", "expected"),
    [
        ({"by": "ratio", "over": "token", "low": 0.5, "high": 2}, [1, 0, 1, 0]),
        ({"by": "ratio", "over": "token", "low": 0.5}, [1, 0, 0, 0]),
        ({"by": "ratio", "over": "token", "high": 2}, [0, 0, 1, 0]),
        ({"by": "ratio", "over": "sequence_mean", "low": 0.77, "high": 1.73}, [0, 0, 1, 1]),
        ({"by": "ratio", "over": "sequence_mean", "low": 0.78, "high": 1.74}, [1, 1, 0, 0]),
        ({"by": "ratio", "over": "sequence_product", "low": 0.59, "high": 2.9}, [0, 0, 1, 1]),
        ({"by": "ratio", "over": "sequence_product", "low": 0.61, "high": 3.1}, [1, 1, 0, 0]),
        ({"by": "ratio", "over": "sequence_max", "high": 2.9}, [0, 0, 1, 1]),
        ({"by": "ratio", "over": "sequence_max", "high": 3.1}, [0, 0, 0, 0]),
        ({"by": "k3", "over": "token", "high": 0.31}, [1, 0, 1, 0]),
        ({"by": "k3", "over": "sequence_mean", "high": 0.21}, [0, 0, 1, 1]),
        ({"by": "k3", "over": "sequence_mean", "high": 0.2}, [1, 1, 1, 1]),
        ({"by": "k3", "over": "sequence_max", "high": 0.32}, [0, 0, 1, 1]),
    ],
)
def test_what_is_rejected_by_hand(reject: dict[str, Any], expected: list[float]):
    inputs = tokens_of(logs(0.2, 0.6, 0.6, 0.3), logs(0.5, 0.4, 0.2, 0.3), [0, 0, 1, 1])
    assert reasons(inputs, reject=reject) == expected
    loss = loss_function(algorithm(reject=reject))(TrainedTokens(**inputs)).per_token_N
    kept = [-weight * (not why) for weight, why in zip([0.4, 1.5, 2.0, 1.0], expected, strict=True)]
    assert loss.tolist() == pytest.approx(kept)
    (gradient,) = torch.autograd.grad(loss.sum(), inputs["logprobs_N"])
    assert gradient.tolist() == pytest.approx(kept)


def test_a_veto_rejects_the_whole_sequence_of_one_unlikely_token():
    inputs = tokens_of(logs(0.2, 0.6, 0.6, 0.3), logs(0.5, 0.4, 0.2, 0.3), [0, 0, 1, 1])
    assert reasons(inputs, veto=0.41) == [2, 2, 0, 0] and reasons(inputs, veto=0.39) == [0, 0, 0, 0]
    both = {"by": "ratio", "over": "token", "low": 0.5, "high": 2}
    assert reasons(inputs, veto=0.41, reject=both) == [3, 2, 1, 0]


def test_negative_advantages_of_sequences_that_have_become_unlikely_are_rejected():
    """Mean log(behaviour / current): of the first two sequences (log 4 + log 1) / 2 = 0.693, of the third -0.693."""
    behaviour, current = logs(0.4, 0.5, 0.4, 0.5, 0.25), logs(0.1, 0.5, 0.1, 0.5, 0.5)
    inputs = tokens_of(behaviour, behaviour, [0, 0, 1, 1, 2]) | {"logprobs_N": current}
    inputs["advantages_N"] = torch.tensor([-1.0, -0.5, 1.0, 0.0, -1.0], dtype=torch.float64)
    assert reasons(inputs, off_policy_delta=0.69) == [4, 4, 0, 0, 0]
    assert reasons(inputs, off_policy_delta=0.7) == [0, 0, 0, 0, 0]
    inputs["proximal_N"] = current
    assert reasons(inputs, off_policy_delta=0.69, veto=0.3) == [6, 6, 2, 2, 0]


def test_a_rejected_token_leaves_the_kl_term_and_the_bonus_too():
    inputs = tokens_of(logs(0.2, 0.6), logs(0.5, 0.6), [0, 1])
    inputs |= {"reference_N": logs(0.1, 0.3), "entropies_N": torch.tensor([0.5, 0.5])}
    reject = {"by": "ratio", "over": "token", "low": 0.5}
    loss = loss_function(algorithm(reject=reject, kl_coef=0.1, entropy_coef=0.2))(TrainedTokens(**inputs))
    k3 = 0.5 - LN(0.5) - 1
    assert loss.per_token_N.tolist() == pytest.approx([0, -1 + 0.1 * k3 - 0.2 * 0.5])


def test_a_long_sequence_is_judged_as_a_short_one_is():
    """The product of 2000 ratios of 1.0005 is 2.7; their geometric mean is 1.0005."""
    behaviour = torch.full((2002,), -1.0)
    inputs = tokens_of(behaviour + LN(1.0005), behaviour, [0] * 2000 + [1] * 2)
    for high, why in ((1.001, 0), (1.0004, 1)):
        reject = {"by": "ratio", "over": "sequence_mean", "low": 0.999, "high": high}
        assert reasons(inputs, reject=reject) == [why] * 2002


@pytest.mark.parametrize("apart", [-700.0, -89.0, 89.0, 700.0])
@pytest.mark.parametrize("over", ["token", "sequence_mean", "sequence_max"])
def test_probabilities_however_far_apart_are_judged_rightly(apart: float, over: str):
    """exp(89) overflows float32."""
    inputs = tokens_of(torch.full((2,), -1.0), torch.tensor([-1.0, -1.0 - apart]), [0, 1])
    assert reasons(inputs, reject={"by": "k3", "over": over, "high": 10}, veto=1e-4) == [0, 1 if apart > 0 else 3]
    by_ratio = reasons(inputs, reject={"by": "ratio", "over": over, "high": 100})
    assert by_ratio == [0, apart > 0]
    loss = loss_function(algorithm(reject={"by": "ratio", "over": over, "high": 100}))(TrainedTokens(**inputs))
    assert loss.per_token_N.isfinite().all()


def test_a_rejection_does_not_hide_nan():
    inputs = tokens_of(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), [0, 1])
    for over in ("token", "sequence_mean", "sequence_max"):
        reject = {"by": "ratio", "over": over, "high": 2}
        loss = loss_function(algorithm(reject=reject, veto=0.1, off_policy_delta=0.1))(
            TrainedTokens(**inputs)
        ).per_token_N
        assert loss.isnan().tolist() == [True, False]


def test_a_sequence_is_judged_alike_alone_and_among_others():
    torch.manual_seed(0)
    rows = sorted(torch.randint(0, 20, (300,)).tolist())
    inputs = tokens_of(-torch.rand(300), -torch.rand(300), rows)
    for over, high in (("token", 1.05), ("sequence_mean", 1.05), ("sequence_max", 2.3)):
        options = {"reject": {"by": "ratio", "over": over, "high": high}, "veto": 0.4}
        together = reasons(inputs, **options)
        alone: list[float] = []
        for row in sorted(set(rows)):
            own = torch.tensor(rows) == row
            found = {name: tensor[own].detach() for name, tensor in inputs.items()} | {"rows_N": torch.zeros(1).long()}
            found["rows_N"] = found["rows_N"].expand(int(own.sum()))
            alone += reasons(found, **options)
        assert alone == together and {0, 1} <= {why % 2 for why in together}


def plain(logprobs_N: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return -logprobs_N, {}


def test_it_works_beside_a_loss_of_the_users_own():
    inputs = tokens_of(logs(0.2, 0.6), logs(0.5, 0.6), [0, 1])
    own = algorithm(loss="tests.training.test_rejection.plain", veto=0.5)
    assert loss_function(own)(TrainedTokens(**inputs)).per_token_N.tolist() == pytest.approx([0, -LN(0.6)])


def test_without_it_nothing_is_judged():
    inputs = tokens_of(logs(0.2, 0.6), logs(0.5, 0.6), [0, 1])
    assert loss_function(algorithm())(TrainedTokens(**inputs)).rejected_N is None


# In a step -----------------------------------------------------------------------------------------------------------


def test_a_step_records_what_it_rejected_however_it_is_cut(tmp_path: Path):
    """Several micro-batches or one, several updates or one: they reject the same tokens."""
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path, scale=0.2)
    batch = make_batch(logprob=-4.6)
    found = []
    for budget, minibatches in ((20, 1), (10_000, 1), (10_000, 3)):
        options = {
            "minibatches": minibatches,
            "loss_mean": "sequence",
            "reject": {"by": "ratio", "over": "sequence_mean", "low": 0.98, "high": 1.02},
            "veto": 0.9,
        }
        engine = TrainEngine(make_config(tmp_path, training={"micro_batch_tokens": budget}, algorithm=options))
        found.append(engine.train_step(batch))
    masks = [row.loss_mask for row in batch]
    for each in found:
        why = each.stages["rejected"]
        tokens = np.concatenate([reasons[mask] for reasons, mask in zip(why, masks, strict=True)])
        loss = np.concatenate([loss[mask] for loss, mask in zip(each.stages["loss"], masks, strict=True)])
        assert not loss[tokens > 0].any() and loss[tokens == 0].all()
        whole = [reasons[mask].max() for reasons, mask in zip(why, masks, strict=True)]
        assert [reasons[mask].min() for reasons, mask in zip(why, masks, strict=True)] == whole
        assert each.metrics["rejected_share"] == pytest.approx((tokens > 0).mean())
        assert each.metrics["rejected_sequences_share"] == np.mean(np.array(whole) > 0)
        assert each.metrics["veto_share"] == np.mean(np.array(whole) >= 2)
        for row, reasons, proximal in zip(batch, why, each.stages["proximal_logprobs"], strict=True):
            ratio = np.exp((proximal - row.logprobs)[row.loss_mask].astype(np.float64))
            outside = not 0.98 <= np.exp(np.log(ratio).mean()) <= 1.02
            assert reasons.max() == outside + 2 * (ratio.min() < 0.9)
        assert {0, 1, 2, 3} >= set(whole) and len(set(whole)) > 1
        assert all(np.array_equal(one, other) for one, other in zip(why, found[0].stages["rejected"], strict=True))
    assert found[0].metrics["loss"] == pytest.approx(found[1].metrics["loss"], rel=1e-5)


def test_a_step_without_it_records_nothing_of_it(tmp_path: Path):
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path)
    result = TrainEngine(make_config(tmp_path)).train_step(make_batch())
    assert "rejected" not in result.stages and not {"rejected_share", "veto_share"} & result.metrics.keys()


# Published masks -----------------------------------------------------------------------------------------------------


def test_a_mask_of_token_weights_is_a_rejection_bit_for_bit():
    """importance=token_mask with the cap C keeps w in [1/C, C], as a rejection with these bounds does."""
    torch.manual_seed(0)
    behaviour = -3 * torch.rand(10_000)
    inputs = tokens_of(behaviour + 0.7 * torch.randn(10_000), behaviour, [0] * 10_000)
    masked = loss_function(algorithm(importance="token_mask", importance_cap=1.7))(TrainedTokens(**inputs))
    reject = {"by": "ratio", "over": "token", "low": 1 / 1.7, "high": 1.7}
    rejected = loss_function(algorithm(importance_cap=1.7, reject=reject))(TrainedTokens(**inputs))
    assert torch.equal(masked.per_token_N, rejected.per_token_N)
    assert rejected.rejected_N is not None and 100 < int(rejected.rejected_N.sum()) < 9900
    of_both = (torch.autograd.grad(each.per_token_N.sum(), inputs["logprobs_N"])[0] for each in (masked, rejected))
    assert torch.equal(*of_both)


def icepop(log_weight: Tensor, mask: Tensor) -> Tensor:
    """IcePop, arXiv 2510.18855, equation 4, with the bounds of NeMo RL and OpenRLHF."""
    weight = log_weight.exp()
    return torch.where((weight >= 0.5) & (weight <= 5), weight, 0.0)


def one_sided(log_weight: Tensor, mask: Tensor) -> Tensor:
    """TRL's vllm_importance_sampling_mode="token_mask" with clip_max=1.3 and no clip_min."""
    weight = log_weight.exp()
    return weight.masked_fill(weight > 1.3, 0.0)


def geometric(log_weight: Tensor, mask: Tensor) -> Tensor:
    """SkyRL's sequence_mask_metric="geometric" beside tis_ratio_type="token"; verl's decoupled_geo_rs_token_tis."""
    mean = (log_weight * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return log_weight.exp().clamp(max=2.0) * ((mean.exp() >= 0.8) & (mean.exp() <= 1.25))


def raw_geometric(log_weight: Tensor, mask: Tensor) -> Tensor:
    """seq-mask-tis of NeMo RL and OpenRLHF, whose token weights are not truncated."""
    mean = (log_weight * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return log_weight.exp() * ((mean.exp() >= 0.8) & (mean.exp() <= 1.25))


def k3_mean(log_weight: Tensor, mask: Tensor) -> Tensor:
    """verl's rollout_rs="seq_mean_k3" beside token weights."""
    k3 = log_weight.exp() - log_weight - 1
    mean = (k3 * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return log_weight.exp().clamp(max=2.0) * (mean <= 0.3)


def k3_token(log_weight: Tensor, mask: Tensor) -> Tensor:
    """verl's rollout_rs="token_k3" beside token weights."""
    return log_weight.exp().clamp(max=2.0) * (log_weight.exp() - log_weight - 1 <= 0.1)


def k3_max(log_weight: Tensor, mask: Tensor) -> Tensor:
    """verl's rollout_rs="seq_max_k3" beside token weights."""
    k3 = (log_weight.exp() - log_weight - 1).masked_fill(~mask, -torch.inf)
    return log_weight.exp().clamp(max=2.0) * (k3.amax(1, keepdim=True) <= 0.3)


def k1_mean(log_weight: Tensor, mask: Tensor) -> Tensor:
    """verl's rollout_rs="seq_mean_k1" with rollout_rs_threshold="0.8_2.0": its bounds are those of -log w."""
    mean = (-log_weight * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return log_weight.exp().clamp(max=2.0) * ((mean >= LN(0.8)) & (mean <= LN(2.0)))


def outliers(log_weight: Tensor, mask: Tensor) -> Tensor:
    """SkyRL's outlier_token_is_threshold_low and _high: sequences with any token outside are masked."""
    weight = log_weight.exp().where(mask, 1.0)
    inside = (weight >= 0.35) & (weight <= 1.6)
    return weight.clamp(max=2.0) * inside.all(1, keepdim=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("published", "options"),
    [
        (icepop, {"importance_cap": 5, "reject": {"by": "ratio", "over": "token", "low": 0.5, "high": 5}}),
        (one_sided, {"reject": {"by": "ratio", "over": "token", "high": 1.3}}),
        (geometric, {"reject": {"by": "ratio", "over": "sequence_mean", "low": 0.8, "high": 1.25}}),
        (
            raw_geometric,
            {"importance_cap": 1e9, "reject": {"by": "ratio", "over": "sequence_mean", "low": 0.8, "high": 1.25}},
        ),
        (k3_mean, {"reject": {"by": "k3", "over": "sequence_mean", "high": 0.3}}),
        (k3_token, {"reject": {"by": "k3", "over": "token", "high": 0.1}}),
        (k3_max, {"reject": {"by": "k3", "over": "sequence_max", "high": 0.3}}),
        (k1_mean, {"reject": {"by": "ratio", "over": "sequence_mean", "low": 1 / 2.0, "high": 1 / 0.8}}),
        (outliers, {"veto": 0.35, "reject": {"by": "ratio", "over": "sequence_max", "high": 1.6}}),
    ],
)
def test_equals_published_masks_in_trl_s_loss(tmp_path: Path, published: Any, options: dict[str, Any]):
    """The masks are written here from their formulas; TRL's loss uses them in place of its own weights."""
    case = Case(tmp_path)
    behaviour = case.old + 0.3 * torch.randn(4, 7) + torch.tensor([[0.0], [0.8], [0.0], [-0.5]])
    log_weight = (case.old - behaviour) * case.mask
    weight = published(log_weight, case.mask)
    assert (weight[case.mask] == 0).any() and (weight[case.mask] != 0).any()
    trainer = trl_trainer(tmp_path, "GRPO", loss_type="dapo", beta=0.0)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    for ours, theirs in zip(
        case.ours(options, behaviour), case.theirs(trainer, importance_sampling_ratio=weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("token_mask", {"reject": {"by": "ratio", "over": "token", "high": 1.3}}),
        (
            "sequence_mask",
            {"importance": "sequence_truncate", "reject": {"by": "ratio", "over": "sequence_product", "high": 1.3}},
        ),
    ],
)
def test_one_sided_masks_equal_those_that_trl_computes(tmp_path: Path, mode: str, options: dict[str, Any]):
    """TRL's own lines compute the weights, and its trainer computes the loss. sequence_mask is TRL's default."""
    case = Case(tmp_path)
    behaviour = case.old + 0.2 * torch.randn(4, 7) + torch.tensor([[0.0], [-0.3], [0.2], [0.0]])
    trainer = trl_trainer(tmp_path, "GRPO", loss_type="dapo", beta=0.0)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    weight = weights_of_trl(type(trainer), mode, case, behaviour)
    assert (weight == 0).any() and (weight != 0).any()
    ours = case.ours({"importance_cap": 1.3, **options}, behaviour)
    theirs = case.theirs(trainer, importance_sampling_ratio=weight)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def weights_of_trl(trainer: type, mode: str, case: Case, behaviour: Tensor) -> Tensor:
    """Run the statement of TRL's trainer that computes its importance weights."""
    source = ast.parse(textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions)))  # type: ignore[attr-defined]
    (statement,) = (
        node
        for node in ast.walk(source)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "invalid_mis_mask" in ast.unparse(node)
    )
    options = {"vllm_importance_sampling_" + name: value for name, value in {"clip_min": None, "clip_max": 1.3}.items()}
    names = {
        "self": SimpleNamespace(
            use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode, **options
        ),
        "completion_mask": case.mask,
        "tool_mask": None,
        "old_per_token_logps": case.old,
        "sampling_per_token_logps": behaviour,
        "torch": torch,
        "math": math,
    }
    exec(compile(ast.Module([statement], []), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore")
def test_the_off_policy_mask_equals_trl_s(tmp_path: Path):
    case = Case(tmp_path)
    case.advantages = torch.tensor([-1.0, -1.0, 0.5, -2.0])
    away = ((case.old - case.current().detach()) * case.mask).sum(1) / case.mask.sum(1)
    delta = float(away[[0, 1, 3]].sort().values[:2].mean().clamp(min=1e-6))
    assert 0 < int((away[[0, 1, 3]] > delta).sum()) < 3
    trainer = trl_trainer(tmp_path, "GRPO", loss_type="dapo", beta=0.0, off_policy_mask_threshold=delta)
    for ours, theirs in zip(case.ours({"off_policy_delta": delta}), case.theirs(trainer), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_value_at_a_bound_is_kept():
    """verl, NeMo RL and TRL keep a value that equals a bound."""

    one = torch.zeros(3)
    two = torch.log(torch.tensor([0.5, 1.0, 2.0]))
    bounds = {"by": "ratio", "over": "token", "low": float(two.exp()[0]), "high": float(two.exp()[2])}
    tokens = TrainedTokens(logprobs_N=two, proximal_N=two, behaviour_N=one, advantages_N=one)
    assert rejections(tokens, algorithm(reject=bounds)).tolist() == [0, 0, 0]
