"""The losses, on numbers worked out by hand, against TRL's, and their gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clew.models import load_model
from clew.training.losses import k3, policy_loss, supervised_loss
from clew.training.scoring import score
from tests.models import tiny_model, tiny_tokenizer

LN = math.log
OPTIONS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "importance_cap": 2.0}


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([LN(p) for p in probabilities], dtype=torch.float64)


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
    torch.testing.assert_close(supervised_loss(logprobs).mean(), expected)


@pytest.mark.filterwarnings("ignore")
def test_equals_the_loss_of_trl(tmp_path):
    """GRPOTrainer on the same batch: asymmetric clip, k3, token mean; and its gradient."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path, scale=0.1)
    args = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"),
        loss_type="bnpo",
        beta=0.07,
        epsilon=0.2,
        epsilon_high=0.3,
        num_generations=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
        use_bias_correction_kl=False,  # its k3 is weighted by the ratio otherwise
    )
    trainer = trl.GRPOTrainer(
        model=str(tmp_path),
        args=args,
        reward_funcs=lambda **_: [0.0],
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.eval()
    torch.manual_seed(0)
    prompts, completions = torch.randint(6, 90, (4, 5)), torch.randint(6, 90, (4, 7))
    mask = torch.arange(7) < torch.tensor([7, 3, 5, 1])[:, None]
    old, reference = -3 * torch.rand(4, 7) - 1, -3 * torch.rand(4, 7) - 1
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
    theirs = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": completions,
            "completion_mask": mask.long(),
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        },
    )
    theirs.backward()
    their_gradient = trainer.model.get_input_embeddings().weight.grad

    model = load_model(str(tmp_path), "float32", torch.device("cpu"))
    rows, columns = mask.nonzero(as_tuple=True)
    scores = score(model, torch.cat([prompts, completions], 1), rows, columns + 5, torch.ones(len(rows)))
    loss = policy_loss(
        logprobs_N=scores.logprobs_N,
        proximal_N=old[mask],
        behaviour_N=old[mask],
        advantages_N=advantages[rows],
        clip_low=0.2,
        clip_high=0.3,
        importance_cap=2.0,
        reference_N=reference[mask],
        kl_coef=0.07,
    )
    ours = loss.per_token_N.mean()
    ours.backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, their_gradient)
