"""TRL's GRPOTrainer, on one process, leaving a Clew run: RecordedGRPOTrainer(Writer("runs/trl/0"), model=..., ...)."""

from torch import arange, cat, tensor
from trl.trainer.grpo_trainer import GRPOTrainer


class RecordedGRPOTrainer(GRPOTrainer):
    def __init__(self, record, **kwargs):
        super().__init__(**kwargs)
        self.record, self.seen = record, []

    def _generate_and_score_completions(self, inputs):  # TRL shuffles and splits all of its result together
        batch, count, n = super()._generate_and_score_completions(inputs), len(inputs), self.num_generations or 1
        names, logged = self.record.new_groups(count // n), self._logs["rewards"].values()
        rewards = self.reward_weights.cpu() @ tensor([list(each)[-count:] for each in logged]).nan_to_num()
        self.rows = [{"group_id": names[i // n], "data": inputs[i], "reward": rewards[i]} for i in range(count)]
        return batch | {"row": arange(count)}

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.scored

    def _compute_loss(self, model, batch):
        loss, now = super()._compute_loss(model, batch), self.scored[0].detach()
        then = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps", now))
        for i, row in enumerate(batch["row"].tolist()):
            prompt, completion = batch["prompt_mask"][i], batch["completion_mask"][i]
            real, mask = cat([prompt, completion]) > 0, batch.get("tool_mask", batch["completion_mask"])[i]
            tokens = cat([batch["prompt_ids"][i], batch["completion_ids"][i]])[real]
            trained, old, new = (cat([prompt * 0, each * mask])[real] for each in (completion, then[i], now[i]))
            sequence = {"input_ids": tokens, "loss_mask": trained, "logprobs": old, "temperatures": self.temperature}
            self.seen.append((self.rows[row] | sequence, batch["advantages"][i], new))
        return loss

    def log(self, logs, *args):  # with logging_steps=1: once a step
        super().log(logs, *args)
        if self.seen:
            sequences, advantages, logprobs, self.seen = *zip(*self.seen, strict=True), []
            self.record.step(sequences, stages={"advantages": advantages, "logprobs": logprobs}, metrics=logs)
