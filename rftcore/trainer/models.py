"""The models of a learner: which of them an algorithm needs, how they are opened, and the step of their optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch import Tensor

from rftcore.algorithms.algorithm import Algorithm
from rftcore.config.trainer import BACKENDS
from rftcore.trainer.learner_arguments import LearnerArguments
from rftcore.trainer.network.network import Network
from rftcore.trainer.network.opened_model import Head
from rftcore.trainer.network.sharding import Grid
from rftdata.errors import ConfigError


class Models:
    """The policy, or the reward model in its place, and the models beside it.

    Attributes:
        reference: None, too, where the policy without its adapters is the reference.

    Raises:
        ModelError: a model cannot be opened.
        PluginError: the backend does not exist.
        ConfigError: a model does not fit the others: a critic with fewer tokens, or, for an algorithm that compares whole distributions, no
            teacher, or one with another vocabulary.
    """

    def __init__(self, arguments: LearnerArguments, algorithm: Algorithm, grid: Grid) -> None:
        config = arguments.config
        self._config, self._algorithm, self._grid = config, algorithm, grid
        self._network_class: type[Network] = BACKENDS.load(config.backend, arguments.base_dir)
        self.reference: Network | None = None
        if "reference" in algorithm.signals and config.lora is None:
            self.reference = self._network_class(arguments.model_path, config, grid, offload=config.offload_reference)
        self.teacher: Network | None = None
        teacher = algorithm.config.teacher
        if teacher is not None and {"teacher", "teacher_logits"} & algorithm.signals:
            self.teacher = self._network_class(arguments.teacher_path or teacher.path, config, grid)
        self.critic: Network | None = None
        self._open_trained(arguments.model_path, arguments.critic_path or arguments.model_path)
        if "teacher_logits" in algorithm.signals:
            refuse_other_vocabulary(self.policy, self.teacher)

    def reopen_trained(self, policy_path: str, critic_path: str) -> None:
        """Open the policy and the critic again from other folders; memory never holds two of each."""
        del self.policy
        self.critic = None
        gc.collect()  # sharded modules refer to themselves
        self._open_trained(policy_path, critic_path)

    def _open_trained(self, policy_path: str, critic_path: str) -> None:
        head: Head = "value" if self._algorithm.trains_scorer else "vocabulary"
        self.policy = self._network_class(
            policy_path, self._config, self._grid, head=head, learning_rate=self._config.learning_rate, adapters=True
        )
        critic = self._algorithm.config.critic
        if critic is not None:
            self.critic = self._network_class(
                critic_path, self._config, self._grid, head="value", learning_rate=critic.learning_rate
            )
            refuse_fewer_tokens(self.policy, self.critic)

    def trained(self) -> dict[str, Network]:
        """Return the models with an optimizer, by the name of its state in a checkpoint."""
        critic = {} if self.critic is None else {"critic_optimizer": self.critic}
        return {"optimizer": self.policy, **critic}

    def update(self, share: float, *, learns: bool) -> dict[str, float]:
        """Free what only a backward pass would free, and make one step of the optimizers; return the norms of the gradients, by metric.

        Args:
            share: of the peak learning rate.
            learns: whether the policy has a gradient; a critic always has.
        """
        self.release()
        norms: dict[str, float] = {}
        if self.critic is not None:
            norms["critic_grad_norm"] = self.critic.update(share)
        if learns:
            norms["grad_norm"] = self.policy.update(share)
        return norms

    def release(self) -> None:
        """Free the gathered weights that only a backward pass would free, after passes without gradient."""
        for network in self._all():
            network.release()

    def device_tensors(self) -> Iterator[Tensor]:
        """Yield the weights and the optimizer state that lie on the device."""
        for network in self._all():
            tensors = (*network.model.parameters(), *network.optimizers.state().values())
            yield from (tensor for tensor in tensors if tensor.device.type == self._grid.device.type)

    def _all(self) -> Iterator[Network]:
        for network in (self.policy, self.reference, self.teacher, self.critic):
            if network is not None:
                yield network


def refuse_other_vocabulary(policy: Network, teacher: Network | None) -> None:
    """Refuse a teacher whose distributions cannot be compared with the policy's.

    Raises:
        ConfigError: there is no teacher, or it has another vocabulary.
    """
    if teacher is None:
        raise ConfigError(
            "the algorithm compares whole distributions over the vocabulary, which are not stored",
            todo="set algorithm.teacher to a model, or use on_policy_distillation or jsd_sampled",
        )
    sizes = [network.model.get_output_embeddings().weight.shape[0] for network in (policy, teacher)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "the teacher has another vocabulary than the policy, so their distributions cannot be compared",
            value=f"{sizes[1]} tokens",
            allowed=f"{sizes[0]} tokens",
            todo="name a teacher of the same family in algorithm.teacher",
        )


def refuse_fewer_tokens(policy: Network, critic: Network) -> None:
    """Refuse a critic that starts from a model with fewer tokens than the policy.

    Raises:
        ConfigError: the critic lacks tokens of the policy.
    """
    sizes = [network.num_tokens for network in (policy, critic)]
    if sizes[1] < sizes[0]:
        raise ConfigError(
            "the critic has fewer tokens than the policy, so it cannot read what the policy writes",
            value=f"{sizes[1]} tokens",
            allowed=f"{sizes[0]} or more",
            todo="name a model with the policy's tokenizer in algorithm.critic.path, or leave it out",
        )
