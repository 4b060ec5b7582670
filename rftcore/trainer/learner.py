"""The learner: a policy, the models beside it, and the step from a batch to new weights.

Invariants:
- One `update` is one trainer step. Each of its optimizer updates has a gradient that does not depend on how the batch is cut into
  micro-batches.
- Log-probabilities are under the distribution that was sampled from (logits divided by `temperature`) where the algorithm learns from
  samples, and the model's own (temperature 1) where it does not.
- After `load_checkpoint` the learner goes on as if it had never stopped: bit-equal on a CPU.

- Every rank of the process group has a learner made with the same arguments, and calls the same methods with the same whole batch. Each
  computes its own micro-batches; what is known of the batch, and every metric, is the same on all.

It knows nothing of the buffer, of engines or of how ranks are started.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.device_copy import copy_to_device
from rftcore.algorithms.plan import Plan
from rftcore.config.trainer import BACKENDS, TrainerConfig
from rftcore.sync.device_names import torch_device
from rftcore.sync.files.weights_stream import Layout, write_rows
from rftcore.sync.tensors import HeldRows, WireTensor
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.trainer.batches.micro_batches import MicroBatch
from rftcore.trainer.batches.train_batch import TrainBatch, refuse_missing_behavior
from rftcore.trainer.checkpoints import (
    CheckpointWriter,
    copy_tokenizer,
    encoded_state,
    random_state,
    read_state,
    read_tensors,
    set_random_state,
    sizes_under,
    staged,
    write_training_state,
)
from rftcore.trainer.divergence import Divergence
from rftcore.trainer.models import Models, refuse_fewer_tokens, refuse_other_vocabulary
from rftcore.trainer.network.host_copy import HostCopy
from rftcore.trainer.network.network import Network
from rftcore.trainer.network.opened_model import Head
from rftcore.trainer.network.optimizers import learning_rate_at
from rftcore.trainer.network.sharding import Grid, make_grid
from rftcore.trainer.progress import StepProgress
from rftcore.trainer.update_metrics import means, totals
from rftdata.errors import ConfigError, ModelError

_CRITIC = "critic"


class Learner:
    """Trains one causal language model, or one reward model, with one algorithm.

    Args:
        model_path: folder of a model or a checkpoint, or a Hugging Face id.
        config: the trainer's section.
        algorithm: gives advantages and losses.
        seed: of torch's generators.
        temperature: the rollouts' sampling temperature. Of no effect with an algorithm that does not learn from samples
            (`Algorithm.learns_from_samples`).
        total_steps: length of the run; `lr_schedule: cosine` needs it.
        teacher_path: folder of the teacher; None for `algorithm.teacher.path` as it is written.
        critic_path: folder of the model that a critic starts from; None for `model_path`.
        device: CUDA where there is one, else the CPU.
        base_dir: folder that `./` in `config.backend` is relative to.

    Attributes:
        writer: of checkpoints, in a thread.

    Raises:
        ModelError: the model cannot be opened.
        PluginError: there is no such backend.
        ConfigError: adapters of a reward model, cosine without `total_steps`, a temperature that has no distribution, or an algorithm that compares whole
            distributions without a teacher, or with one of another vocabulary.
    """

    def __init__(
        self,
        model_path: str,
        config: TrainerConfig,
        algorithm: Algorithm,
        seed: int,
        *,
        temperature: float = 1.0,
        total_steps: int | None = None,
        teacher_path: str | None = None,
        critic_path: str | None = None,
        device: str | torch.device | None = None,
        base_dir: Path | None = None,
    ) -> None:
        if temperature <= 0 and algorithm.learns_from_samples:
            raise ConfigError("training needs sampled rollouts", value=temperature, allowed="a temperature above 0")
        if config.lr_schedule != "constant" and total_steps is None:
            raise ConfigError(
                f"lr_schedule: {config.lr_schedule} needs the number of steps",
                todo="set steps, or lr_schedule: constant",
            )
        if config.lora is not None:
            algorithm.refuse_adapters()
        if config.num_threads is not None and not dist.is_initialized():  # ranks divide them when they meet
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(seed)
        self.config = config
        self.algorithm = algorithm
        self.temperature = temperature if algorithm.learns_from_samples else 1.0
        self.total_steps = total_steps
        self.grid = make_grid(torch_device(device), config.tensor_parallel)
        self.step = 0
        self._network_class: type[Network] = BACKENDS.load(config.backend, base_dir)
        self._seed = seed
        self._model_path = model_path
        self._divergence = Divergence()
        self.progress = StepProgress(self.grid.device)
        self._host_copy = HostCopy()
        self.writer = CheckpointWriter(self.grid)
        self.reference = None
        if "reference" in algorithm.signals and config.lora is None:
            self.reference = self._network_class(model_path, config, self.grid, offload=config.offload_reference)
        self.teacher = None
        if algorithm.config.teacher is not None and {"teacher", "teacher_logits"} & algorithm.signals:
            self.teacher = self._network_class(teacher_path or algorithm.config.teacher.path, config, self.grid)
        self.critic: Network | None = None
        self._set_models(model_path, critic_path or model_path)
        if "teacher_logits" in algorithm.signals:
            refuse_other_vocabulary(self.policy, self.teacher)

    @property
    def model(self) -> PreTrainedModel:
        """The policy's."""
        return self.policy.model

    @property
    def device(self) -> torch.device:
        return self.grid.device

    @property
    def optimizer(self) -> Optimizer:
        """The policy's; with Muon the one of matrices."""
        return self.policy.optimizers[0]

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """One trainer step: `epochs` · `mini_batches` optimizer updates; returns metrics.

        Args:
            batch: whole groups, or whole pairs for an algorithm that draws them.
            step: number of this step, from 1; sets the learning rate.

        Returns:
            loss, grad_norm (before clipping), learning_rate, num_tokens (that count), num_experiences (that are computed),
            computed_tokens, tokens_per_second (tokens of the experiences, prompts included), seconds, entropy (nats
            per token), skipped (1 when the weights were left as they are), the algorithm's own metrics and, where it
            uses behaviour log-probabilities, logprob_diff (mean |log π - log π_behaviour| before the step) and
            kl_behavior (k3); for pairs pairs_dropped (those with an empty answer, which are not trained), and where rewards form
            them pairs_formed and groups_without_pair; of a mixture of experts router_aux_loss, which `loss` has with its weight,
            router_max_violation and router_entropy (`routing_metrics`). All but counts are means over tokens that count; a pair
            algorithm's own over pairs. Where a step has several updates, they are means over the updates, too.

        A batch without a token or pair that counts, or with a gradient that is not finite, leaves the weights of its model as they are and
        reports `skipped`: one overflow must not end a long run, and the optimizer's moments would never recover from it.

        Raises:
            RftError: a reward that is not a number, an experience that needs behaviour log-probabilities and has none,
                the fifth gradient in a row that is not finite, or the twentieth step in a row with nothing to train.
        """
        started = time.perf_counter()
        if self.config.lora is not None and self.config.lora.dropout:
            # Of each step and rank: a resumed run drops what the first one did, and ranks drop different inputs.
            torch.manual_seed(hash((self._seed, step, self.grid.data_rank)) % 2**63)
        if self.algorithm.uses_behavior_logprobs:
            refuse_missing_behavior(batch, may_be_expert=self.algorithm.expert is not None)
        batch, formed = self._models.as_computed(batch)
        micro_batches = self._models.split(batch)
        flat = batch.for_algorithm(step)
        plan = self.algorithm.plan(flat, self._models.signals(batch, micro_batches, len(flat.sequence_N)))
        learning_rate = self.learning_rate(step)
        computed_tokens, updates = torch.zeros(()), list[dict[str, float]]()
        for epoch in range(self.config.epochs):
            for members in self._mini_batches(batch, step, epoch):
                if members is not None:
                    micro_batches = self._models.split(batch, members)
                computed_tokens += sum(micro_batch.num_tokens for micro_batch in micro_batches)
                current = self._models.updated(plan, batch, micro_batches, members, again=bool(updates))
                chosen = {"mask_kept": current.metrics["mask_kept"]} if self.algorithm.masks_each_update else {}
                updates.append(chosen | self._optimize(current, micro_batches, step))
        self._divergence.end_step(is_empty=not any("loss" in update for update in updates))
        self._models.release()
        metrics = plan.metrics | formed | means(updates)
        self.algorithm.observe(plan, metrics)
        self.step = step
        seconds = time.perf_counter() - started
        return metrics | {
            "learning_rate": learning_rate,
            "num_tokens": float(len(flat.sequence_N)),
            "num_experiences": float(batch.num_experiences),
            "computed_tokens": self.grid.add_up(computed_tokens.to(self.device)).item(),
            "tokens_per_second": float(batch.attention_mask_BT.sum()) / seconds,
            "seconds": seconds,
        }

    def learning_rate(self, step: int) -> float:
        """The policy's learning rate in a step, from 1."""
        return self.config.learning_rate * learning_rate_at(self.config, step, self.total_steps)

    def write_weights(self, places: Layout, tensors: tuple[WireTensor, ...], path: Path) -> None:
        """Write this rank's share of the weights into a file that has been begun; all ranks do it together. See `LearnerGroup`."""
        held = self.policy.held_rows(tensors, places.dtype, places.in_float32)
        write_rows(places, tensors, self.grid.rank, held, path, self.progress.mark)

    def wire_tensors(self, adapters_alone: bool = False) -> tuple[WireTensor, ...]:
        """What the ranks hand over to engines together; see `Network`."""
        return self.policy.wire_tensors(adapters_alone)

    def held_rows(self, plan: TransferPlan) -> Iterator[HeldRows]:
        """What this rank holds of every weight that travels. All ranks walk it."""
        return self.policy.held_rows(
            plan.tensors, plan.dtype, plan.in_float32, adapters_alone=plan.adapters is not None
        )

    def leave_device(self, to_host: bool) -> int:
        """Free what is not needed until the next step; return the bytes that wait in the memory of the host.

        Nothing can be computed or exported before `to_device`.

        Args:
            to_host: move weights and optimizer state to the host, too.
        """
        self._models.release()
        moved = self._host_copy.leave(self._device_tensors()) if to_host else 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return moved

    def to_device(self) -> None:
        """Take back what `leave_device` has moved to the host."""
        self._host_copy.come_back()

    def _device_tensors(self) -> Iterator[Tensor]:
        for network in (self.policy, self.reference, self.teacher, self.critic):
            if network is not None:
                tensors = (*network.model.parameters(), *network.optimizer_state().values())
                yield from (tensor for tensor in tensors if tensor.device.type == self.device.type)

    def save_pretrained(self, folder: Path) -> None:
        """Write model and tokenizer as a Hugging Face folder."""
        write = self.policy.stage()
        if self.grid.is_first:
            write(folder)
            copy_tokenizer(self._model_path, folder)

    def save_checkpoint(self, folder: Path) -> None:
        """Write everything needed to go on; the folder exists afterwards whole, or not at all.

        Raises:
            DiskFullError: no room.
        """
        self.begin_checkpoint(folder)
        self.writer.end()

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy everything needed to go on to the host's memory, and begin to write it: `writer.end` waits for it."""
        self.writer.end()  # the memory of two copies would be needed otherwise
        self.writer.begin(folder, self._stage())

    def _stage(self) -> Callable[[Path, Grid], None]:
        """What writes a checkpoint of this moment, whatever is trained meanwhile."""
        tensors = random_state(self.device)
        for prefix, network in self._trained().items():
            tensors |= {f"{prefix}/{key}": value for key, value in network.optimizer_state().items()}
        tensors = staged(tensors)
        scalars = encoded_state(
            {
                "step": self.step,
                "algorithm": self.algorithm.name,
                "skipped_in_a_row": self._divergence.skipped_in_a_row,
                "empty_in_a_row": self._divergence.empty_in_a_row,
                "algorithm_state": self.algorithm.state_dict(),
            }
        )
        write_policy = self.policy.stage()
        write_critic = None if self.critic is None else self.critic.stage()

        def fill(draft: Path, grid: Grid) -> None:
            if grid.is_first:
                write_policy(draft)
                copy_tokenizer(self._model_path, draft)
                if write_critic is not None:
                    write_critic(draft / _CRITIC)
                    copy_tokenizer(self._model_path, draft / _CRITIC)  # so that another run's critic can start from it
            write_training_state(draft, tensors, scalars, grid)

        return fill

    def load_checkpoint(self, folder: Path) -> None:
        """Go back to a checkpoint: weights, optimizer, random state, `step`. The reference model stays as it was.

        Raises:
            ModelError: not a checkpoint, one of another model, or one without the critic that the algorithm has.
        """
        scalars, sizes = read_state(folder)
        if self.critic is not None and not (folder / _CRITIC).is_dir():
            raise ModelError(
                f"the checkpoint {folder} has no critic, and {self.algorithm.name} trains one: the run began with an algorithm without it",
                todo="go on with the run's first algorithm, or start a new run with the checkpoint as model.path",
            )
        del self.policy  # before the new ones are made, so that memory holds one of each
        self.critic = None
        gc.collect()  # sharded modules refer to themselves
        has_adapters = self.config.lora is not None
        self._set_models(self._model_path if has_adapters else str(folder), str(folder / _CRITIC))
        if has_adapters:
            self.policy.load_adapters(folder)
        random = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes_under("random", sizes).items()}
        moments = {
            prefix: network.empty_optimizer_state(sizes_under(prefix, sizes))
            for prefix, network in self._trained().items()
        }
        read_tensors(folder, {"random": random, **moments})
        set_random_state(random, self.device)
        for prefix, network in self._trained().items():
            network.load_optimizer_state(moments[prefix])
        self.step = scalars["step"]
        self._divergence.skipped_in_a_row = scalars["skipped_in_a_row"]
        self._divergence.empty_in_a_row = scalars.get("empty_in_a_row", 0)
        self.algorithm.load_state_dict(scalars["algorithm_state"])

    def _set_models(self, policy_path: str, critic_path: str) -> None:
        head: Head = "value" if self.algorithm.trains_scorer else "vocabulary"
        self.policy = self._network_class(
            policy_path, self.config, self.grid, head=head, learning_rate=self.config.learning_rate, adapters=True
        )
        critic = self.algorithm.config.critic
        if critic is not None:
            self.critic = self._network_class(
                critic_path, self.config, self.grid, head="value", learning_rate=critic.learning_rate
            )
            refuse_fewer_tokens(self.policy, self.critic)

    def _trained(self) -> dict[str, Network]:
        """The models with an optimizer, by their name in a checkpoint."""
        critic = {} if self.critic is None else {"critic_optimizer": self.critic}
        return {"optimizer": self.policy, **critic}

    @property
    def _models(self) -> Models:
        return Models(
            algorithm=self.algorithm,
            temperature=self.temperature,
            policy=self.policy,
            reference=self.reference,
            teacher=self.teacher,
            critic=self.critic,
            mark=self.progress.mark,
        )

    def _mini_batches(self, batch: TrainBatch, step: int, epoch: int) -> list[list[int] | None]:
        """The experiences of each optimizer update of an epoch; None for all at once."""
        if self.config.mini_batches == 1:
            return [None]
        # One seed for each epoch of each step, so that a resumed run deals as the first one did.
        return [*batch.deal(self.config.mini_batches, hash((self._seed, step, epoch)) % 2**63)]

    def _optimize(self, plan: Plan, micro_batches: list[MicroBatch], step: int) -> dict[str, float]:
        """One optimizer update; returns mean metrics."""
        if not micro_batches or not plan.num_units:
            return {"skipped": 1.0}
        sums: dict[str, Tensor] = {}
        plan = plan.to(self.device)
        learns = not self._warms_up_critic(step)
        own_tokens = torch.tensor(float(sum(micro_batch.num_tokens for micro_batch in micro_batches)))
        num_tokens = self.grid.add_up(copy_to_device(own_tokens, self.device))
        for micro_batch in micro_batches:
            added = self._models.accumulate(micro_batch.to(self.device), plan, learns=learns, num_tokens=num_tokens)
            for name, value in added.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
            self.progress.mark()
        # One transfer for all, after the last kernel was launched.
        metrics = totals(sums, self.grid) | self._update_weights(step)
        self.progress.mark()
        return metrics

    def _warms_up_critic(self, step: int) -> bool:
        critic = self.algorithm.config.critic
        return critic is not None and step <= critic.warmup_steps

    def _update_weights(self, step: int) -> dict[str, float]:
        """One step of every optimizer whose model has a gradient; metrics."""
        share = learning_rate_at(self.config, step, self.total_steps)
        norms: dict[str, float] = {}
        if self.critic is not None:
            norms["critic_grad_norm"] = self.critic.update(share)
        if not self._warms_up_critic(step):
            norms["grad_norm"] = self.policy.update(share)
        return norms | {"skipped": float(self._divergence.saw(norms))}
