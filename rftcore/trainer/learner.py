"""The learner: a policy, the models beside it, and the step from a batch to new weights.

Invariants:
- One `update` is one trainer step. Each of its optimizer updates has a gradient that does not depend on how the batch is cut into
  micro-batches.
- Log-probabilities are under the distribution that was sampled from (logits divided by `temperature`) where the algorithm learns from
  samples, and the model's own (temperature 1) where it does not.
- After `load_checkpoint` the learner continues as if it had never stopped: bit-equal on a CPU.
- Every rank of the process group has a learner made with the same arguments, and calls the same methods with the same whole batch. Each
  computes its own micro-batches; facts about the batch, and every metric, are the same on all.

The learner depends neither on the buffer nor on engines, nor on how ranks are started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.compatibility import refuse_adapters
from rftcore.sync.device_names import torch_device
from rftcore.sync.files.weights_stream import Layout, write_rows
from rftcore.sync.tensors import HeldRows, WireTensor
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.trainer.batches.forms import trained_form
from rftcore.trainer.batches.micro_batches import split_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.checkpoints import (
    CheckpointWriter,
    HostMemory,
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
from rftcore.trainer.learner_arguments import LearnerArguments
from rftcore.trainer.models import Models
from rftcore.trainer.network.host_copy import HostCopy
from rftcore.trainer.network.network import Network
from rftcore.trainer.network.optimizers import learning_rate_at
from rftcore.trainer.network.sharding import Grid, make_grid
from rftcore.trainer.step.compilation import Compilation
from rftcore.trainer.step.divergence import Divergence
from rftcore.trainer.step.gradients import GradientPasses
from rftcore.trainer.step.preparation import one_thread
from rftcore.trainer.step.progress import StepProgress
from rftcore.trainer.step.signals import SignalReader
from rftcore.trainer.step.updates import OptimizerUpdates
from rftdata.errors import ConfigError, ModelError

_CRITIC = "critic"


class Learner:
    """Trains one causal language model, or one reward model, with one algorithm.

    Args:
        device: CUDA where there is one, else the CPU.

    Attributes:
        temperature: of the distributions that log-probabilities are of.
        compilation: compiles what a step computes before the first batch is there.
        writer: writes checkpoints in a thread.

    Raises:
        ModelError: the model cannot be opened.
        PluginError: the backend does not exist.
        ConfigError: adapters of a reward model, a learning-rate schedule that needs `total_steps` without them, a temperature that has no
            distribution, or models that do not fit each other (`Models`).
    """

    def __init__(
        self, arguments: LearnerArguments, algorithm: Algorithm, device: str | torch.device | None = None
    ) -> None:
        config = arguments.config
        _refuse_untrainable(arguments, algorithm)
        if config.num_threads is not None and not dist.is_initialized():  # ranks divide them when they meet
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(arguments.seed)
        self._arguments = arguments
        self.config = config
        self.algorithm = algorithm
        self.grid = make_grid(torch_device(device), config.tensor_parallel)
        self.step = 0
        self._divergence = Divergence()
        self.progress = StepProgress(self.grid.device)
        self._host_copy = HostCopy()
        self.writer = CheckpointWriter(self.grid)
        self._host_memory = HostMemory(self.grid.device)
        self.models = Models(arguments, algorithm, self.grid)
        self.temperature = arguments.temperature if algorithm.learns_from_samples else 1.0
        self._signals = SignalReader(self.models, self.temperature, self.progress.mark)
        gradients = GradientPasses(self.models, algorithm, self.temperature, self.progress.mark)
        self.compilation = Compilation(self.models, algorithm, gradients, self._signals)
        self._updates = OptimizerUpdates(self._signals, gradients, self._divergence, config, arguments.seed)

    @property
    def policy(self) -> Network:
        return self.models.policy

    @property
    def device(self) -> torch.device:
        return self.grid.device

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Make one trainer step, of `epochs` · `mini_batches` optimizer updates; return metrics.

        Args:
            batch: whole groups, or whole pairs for an algorithm that draws them.
            step: number of this step, from 1; sets the learning rate.

        Returns:
            loss, grad_norm (before clipping), learning_rate, num_tokens (that count), num_experiences (that are computed),
            computed_tokens, tokens_per_second (tokens of the experiences, prompts included), seconds, entropy (nats
            per token), skipped (1 when the weights were left as they are), the algorithm's own metrics and, where it
            uses behaviour log-probabilities, logprob_diff (mean |log π - log π_behaviour| before the step) and
            kl_behavior (k3); for pairs pairs_dropped (those with an empty answer, which are not trained), and where rewards form
            them pairs_formed and groups_without_pair; for a mixture of experts router_aux_loss, which `loss` includes with its weight,
            router_max_violation and router_entropy (`routing_metrics`). All but counts are means over tokens that count, and a
            pair algorithm's own metrics are means over pairs. In a step of several updates they are means over the updates.

        A batch without a token or pair that counts, or with a gradient that is not finite, leaves the weights of its model as they are and
        reports `skipped`. One overflow must not end a long run, and the optimizer's moments would never recover from it.

        Raises:
            RftError: a reward that is not a number, an experience that needs behaviour log-probabilities and has none,
                the fifth gradient in a row that is not finite, or the twentieth step in a row with nothing to train.
        """
        started = time.perf_counter()
        self._seed_dropout(step)
        rate = learning_rate_at(self.config, step, self._arguments.total_steps)
        with one_thread():
            batch, formed = trained_form(batch, self.algorithm)
            flat = batch.for_algorithm(step)
            micro_batches = split_batch(batch, self.policy.cutting)[self.grid.data_rank]
        signals = self._signals.read(batch, micro_batches, self.algorithm.signals)
        with one_thread():
            plan = self.algorithm.plan(flat, signals)
        measured, computed_tokens = self._updates.make(plan, batch, micro_batches, rate)
        metrics = plan.metrics | formed | measured
        self.algorithm.observe(plan, metrics)
        self.step = step
        seconds = time.perf_counter() - started
        return metrics | {
            "learning_rate": self.config.learning_rate * rate,
            "num_tokens": float(len(flat.sequence_N)),
            "num_experiences": float(batch.num_experiences),
            "computed_tokens": computed_tokens,
            "tokens_per_second": float(batch.attention_mask_BT.sum()) / seconds,
            "seconds": seconds,
        }

    def _seed_dropout(self, step: int) -> None:
        """Seed the dropout of adapters by step and rank: a resumed run drops what the first one did, and ranks drop different inputs."""
        if self.config.lora is not None and self.config.lora.dropout:
            torch.manual_seed(hash((self._arguments.seed, step, self.grid.data_rank)) % 2**63)

    def write_weights(self, places: Layout, tensors: tuple[WireTensor, ...], path: Path) -> None:
        """Write this rank's share of the weights into a file that has been begun; all ranks call this together. See `LearnerGroup`."""
        held = self.policy.held_rows(tensors, places.dtype, places.in_float32)
        write_rows(places, tensors, self.grid.rank, held, path, self.progress.mark)

    def wire_tensors(self, adapters_alone: bool = False) -> tuple[WireTensor, ...]:
        """Return the description of what all ranks hand over to engines; see `Network`."""
        return self.policy.wire_tensors(adapters_alone)

    def held_rows(self, plan: TransferPlan) -> Iterator[HeldRows]:
        """Yield the rows that this rank holds of every weight of a transfer. All ranks iterate together."""
        return self.policy.held_rows(
            plan.tensors, plan.dtype, plan.in_float32, adapters_alone=plan.adapters is not None
        )

    def leave_device(self, to_host: bool) -> int:
        """Free memory on the device that is not needed until the next step; return the number of bytes moved to the host.

        Nothing can be computed or exported before `to_device`.

        Args:
            to_host: also move weights and optimizer state to the host.
        """
        self.models.release()
        moved = self._host_copy.leave(self.models.device_tensors()) if to_host else 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return moved

    def to_device(self) -> None:
        """Move back the tensors that `leave_device` has moved to the host."""
        self._host_copy.come_back()

    def save_pretrained(self, folder: Path) -> None:
        """Write model and tokenizer as a Hugging Face folder."""
        write = self.policy.stage()
        if self.grid.is_first:
            write(folder)
            copy_tokenizer(self._arguments.model_path, folder)

    def save_checkpoint(self, folder: Path) -> None:
        """Write a checkpoint to continue from; afterwards the folder is complete, or does not exist.

        Raises:
            DiskFullError: no room.
        """
        self.begin_checkpoint(folder)
        self.writer.end()

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy the state to the host's memory, and begin to write a checkpoint; `writer.end` waits for it."""
        self.writer.end()  # so that memory never holds two copies
        self.writer.begin(folder, self._stage())

    def _stage(self) -> Callable[[Path, Grid], None]:
        """Copy the current state; return a function that writes the copy as a checkpoint while training continues."""
        tensors = random_state(self.device)
        for prefix, network in self.models.trained().items():
            tensors |= {f"{prefix}/{key}": value for key, value in network.optimizers.state().items()}
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
        write_policy, write_critic = self.policy.stage(self._host_memory.copy), None
        if self.models.critic is not None:
            write_critic = self.models.critic.stage(
                lambda name, tensor: self._host_memory.copy(f"{_CRITIC}/{name}", tensor)
            )
        self._host_memory.wait()

        def fill(draft: Path, grid: Grid) -> None:
            if grid.is_first:
                write_policy(draft)
                copy_tokenizer(self._arguments.model_path, draft)
                if write_critic is not None:
                    write_critic(draft / _CRITIC)
                    copy_tokenizer(
                        self._arguments.model_path, draft / _CRITIC
                    )  # so that another run's critic can start from it
            write_training_state(draft, tensors, scalars, grid)

        return fill

    def load_checkpoint(self, folder: Path) -> None:
        """Restore a checkpoint: weights, optimizer, random state, `step`. The reference model stays as it is.

        Raises:
            ModelError: the folder is no checkpoint, belongs to another model, or lacks the critic that the algorithm has.
        """
        scalars, sizes = read_state(folder)
        if self.models.critic is not None and not (folder / _CRITIC).is_dir():
            raise ModelError(
                f"the checkpoint {folder} has no critic, and {self.algorithm.name} trains one: the run began with an algorithm without it",
                todo="go on with the run's first algorithm, or start a new run with the checkpoint as model.path",
            )
        has_adapters = self.config.lora is not None
        policy_path = self._arguments.model_path if has_adapters else str(folder)
        self.models.reopen_trained(policy_path, str(folder / _CRITIC))
        if has_adapters:
            self.policy.load_adapters(folder)
        random = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes_under("random", sizes).items()}
        moments = {
            prefix: network.optimizers.empty_state(sizes_under(prefix, sizes))
            for prefix, network in self.models.trained().items()
        }
        read_tensors(folder, {"random": random, **moments})
        set_random_state(random, self.device)
        for prefix, network in self.models.trained().items():
            network.optimizers.load_state(moments[prefix], self.device)
        self.step = scalars["step"]
        self._divergence.skipped_in_a_row = scalars["skipped_in_a_row"]
        self._divergence.empty_in_a_row = scalars.get("empty_in_a_row", 0)
        self.algorithm.load_state_dict(scalars["algorithm_state"])


def _refuse_untrainable(arguments: LearnerArguments, algorithm: Algorithm) -> None:
    """Raise a ConfigError if the arguments do not fit each other or the algorithm."""
    if arguments.temperature <= 0 and algorithm.learns_from_samples:
        raise ConfigError(
            "training needs sampled rollouts", value=arguments.temperature, allowed="a temperature above 0"
        )
    if arguments.config.lr_schedule != "constant" and arguments.total_steps is None:
        raise ConfigError(
            f"lr_schedule: {arguments.config.lr_schedule} needs the number of steps",
            todo="set steps, or lr_schedule: constant",
        )
    if arguments.config.lora is not None:
        refuse_adapters(algorithm)
