"""A batch is padded and cut without losing or repeating a token, and no token sees others than its past."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, PretrainedConfig

from rftcore.trainer.batches.micro_batches import Cutting, Kernel, MicroBatch, Sharing, split_batch
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.estimates.packing_trial import try_packing
from rftcore.trainer.network.packable import length_limit, refuse_longer, refuse_unpackable, suits_flash
from rftdata.errors import ConfigError
from tests.support.packing import visible


def make_batch(experiences: list[tuple[list[int], list[int]]], groups: list[int] | None = None) -> TrainBatch:
    """Build a batch from (prompt, response) pairs; the behaviour log-probability of token t of a response is -t - 1."""
    tokens = [np.array([*prompt, *response], np.int32) for prompt, response in experiences]
    masks = [np.array([False] * len(prompt) + [True] * len(response)) for prompt, response in experiences]
    logprobs = [
        np.array([0.0] * len(prompt) + [-1.0 - t for t in range(len(response))], np.float32)
        for prompt, response in experiences
    ]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in tokens])])
    return pad_batch(
        PackedColumns(
            token_ids=(np.concatenate(tokens), offsets),
            loss_mask=(np.concatenate(masks), offsets),
            behavior_logprobs=(np.concatenate(logprobs), offsets),
            rewards=np.arange(len(tokens), dtype=np.float64),
            group_ids=np.array(groups or [0] * len(tokens)),
            rollout_index=np.arange(len(tokens)),
            pad_token_id=99,
        )
    )


class TestPadding:
    def test_pads_right_and_keeps_columns_aligned(self) -> None:
        batch = make_batch([([5, 6], [7]), ([5], [8, 9, 4])], groups=[70, 30])
        assert batch.token_ids_BT.tolist() == [[5, 6, 7, 99], [5, 8, 9, 4]]
        assert batch.attention_mask_BT.tolist() == [[True, True, True, False], [True] * 4]
        assert batch.loss_mask_BT.tolist() == [[False, False, True, False], [False, True, True, True]]
        assert batch.behavior_logprobs_BT.tolist() == [[0, 0, -1, 0], [0, -1, -2, -3]]
        assert batch.group_index_B.tolist() == [1, 0]
        assert (batch.num_experiences, batch.num_loss_tokens) == (2, 4)
        assert batch.token_ids_BT.dtype == batch.group_index_B.dtype == torch.int64
        assert batch.behavior_logprobs_BT.dtype == batch.rewards_B.dtype == torch.float32

    def test_pads_a_slice_of_a_longer_column(self) -> None:
        offsets = np.array([2, 4, 7])
        batch = pad_batch(
            PackedColumns(
                token_ids=(np.arange(10), offsets),
                loss_mask=(np.ones(5, bool), np.array([0, 2, 5])),
                behavior_logprobs=None,
                rewards=[1.0, 2.0],
                group_ids=[1, 1],
                rollout_index=[0, 1],
            )
        )
        assert batch.token_ids_BT.tolist() == [[2, 3, 0], [4, 5, 6]]
        assert torch.equal(batch.behavior_logprobs_BT.isnan(), batch.loss_mask_BT)

    def test_never_counts_the_first_token_which_nothing_predicts(self) -> None:
        assert make_batch([([], [7, 8])]).loss_mask_BT.tolist() == [[False, True]]

    def test_drops_log_probabilities_where_nothing_counts_and_keeps_missing_ones(self) -> None:
        def build(logprobs: list[float]) -> TrainBatch:
            offsets = np.array([0, 3])
            return pad_batch(
                PackedColumns(
                    token_ids=(np.array([1, 2, 3]), offsets),
                    loss_mask=(np.array([False, False, True]), offsets),
                    behavior_logprobs=(np.array(logprobs, np.float32), offsets),
                    rewards=[0.0],
                    group_ids=[0],
                    rollout_index=[0],
                )
            )

        assert build([np.nan, -5.0, -1.0]).behavior_logprobs_BT.tolist() == [[0.0, 0.0, -1.0]]
        assert build([0.0, 0.0, np.nan]).behavior_logprobs_BT.isnan().tolist() == [[False, False, True]]
        with pytest.raises(ValueError, match="experience 0"):
            build([0.0, 0.0, -np.inf])

    def test_refuses_columns_that_do_not_fit(self) -> None:
        offsets = np.array([0, 2])
        column = (np.array([1, 2]), offsets)
        rest = {"behavior_logprobs": None, "group_ids": [0], "rollout_index": [0]}
        with pytest.raises(ValueError, match="loss_mask is not aligned"):
            pad_batch(
                PackedColumns(token_ids=column, loss_mask=(np.ones(3, bool), np.array([0, 3])), rewards=[0.0], **rest)
            )
        with pytest.raises(ValueError, match="rewards has 2 entries for 1"):
            pad_batch(
                PackedColumns(token_ids=column, loss_mask=(np.ones(2, bool), offsets), rewards=[0.0, 1.0], **rest)
            )

    def test_an_empty_batch_has_no_micro_batches(self) -> None:
        batch = pad_batch(
            PackedColumns(
                token_ids=(np.zeros(0, np.int64), np.array([0])),
                loss_mask=(np.zeros(0, bool), np.array([0])),
                behavior_logprobs=None,
                rewards=[],
                group_ids=[],
                rollout_index=[],
            )
        )
        assert split_batch(batch, Cutting(max_tokens=10, num_ranks=2)) == [[], []]


def cut(
    batch: TrainBatch, max_tokens: int, sharing: Sharing = "never", kernel: Kernel = "segments"
) -> list[MicroBatch]:
    """Return the micro-batches of one rank."""
    (micros,) = split_batch(batch, Cutting(max_tokens=max_tokens, sharing=sharing, kernel=kernel))
    return micros


class TestSplitBatch:
    def test_one_row_each_leaves_out_the_last_token_as_an_input(self) -> None:
        batch = make_batch([([5, 6], [7, 8])])
        (micro,) = cut(batch, 100)
        assert micro.token_ids_L.tolist() == [5, 6, 7]
        # 7 is predicted at position 1, 8 at position 2.
        assert (micro.source_N.tolist(), micro.target_N.tolist()) == ([1, 2], [7, 8])
        assert micro.index_N.tolist() == [0, 1]
        assert batch.for_algorithm(1).behavior_N.tolist() == [-1.0, -2.0]

    @pytest.mark.parametrize("kernel", ["segments", "rows"])
    def test_a_shared_prompt_is_computed_once_and_continuations_do_not_see_each_other(self, kernel: Kernel) -> None:
        batch = make_batch([([1, 2, 3, 4], [7, 8]), ([1, 2, 3, 4], [9, 5, 6])])
        (micro,) = cut(batch, 100, "always", kernel)
        assert micro.token_ids_L.tolist() == [1, 2, 3, 4, 7, 9, 5]
        assert micro.position_ids_L.tolist() == [0, 1, 2, 3, 4, 4, 5]
        seen = [row.nonzero().flatten().tolist() for row in visible(micro.packing)]
        assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 5, 6]]
        # 7 and 9, the first of each, are both predicted at the prompt's last position.
        assert micro.source_N.tolist() == [3, 4, 3, 5, 6]
        assert micro.target_N.tolist() == [7, 8, 9, 5, 6]
        assert micro.sequences.sequence_N.tolist() == [0, 0, 1, 1, 1]

    def test_a_masked_row_stops_growing_when_its_continuations_are_as_long_as_its_prompt(self) -> None:
        batch = make_batch([([1, 2, 3, 4], [5, 6, 7])] * 5)
        # Each continuation takes 2 inputs after the prompt of 4: two fit in 8, so rows of 2, 2 and 1.
        assert sorted(micro.num_tokens for micro in cut(batch, 8, "rows", "rows")) == [6, 8, 8]
        assert [micro.num_tokens for micro in cut(batch, 100, "rows", "rows")] == [22]
        assert [micro.num_tokens for micro in cut(batch, 100, "always")] == [14]

    def test_experiences_without_a_token_that_counts_are_not_computed(self) -> None:
        (micro,) = cut(make_batch([([1, 2, 3], []), ([1], [2])]), 100)
        assert micro.sequences.sequence_N.tolist() == [1]

    def test_a_sequence_longer_than_the_limit_is_a_micro_batch(self) -> None:
        micros = cut(make_batch([([1] * 20, [2]), ([1, 2], [3]), ([1, 3], [3])]), 10)
        assert [micro.num_tokens for micro in micros] == [20, 4]

    def test_ranks_get_as_many_micro_batches_each_of_nearly_equal_cost(self) -> None:
        random = np.random.default_rng(0)
        batch = make_batch([([1] * int(p), [2] * int(r)) for p, r in random.integers(1, 60, (300, 2))])
        shares = split_batch(batch, Cutting(max_tokens=500, num_ranks=4))
        assert len({len(share) for share in shares}) == 1
        for together in zip(*shares, strict=True):
            sizes = [micro.num_tokens for micro in together]
            assert max(sizes) <= 500 and min(sizes) > 0.8 * max(sizes)

    def test_a_rank_without_experiences_gets_a_micro_batch_too(self) -> None:
        shares = split_batch(make_batch([([1, 2], [3])]), Cutting(max_tokens=10, num_ranks=3, kernel="rows"))
        assert [
            [(len(micro.index_N), micro.num_tokens, len(micro.token_ids_L)) for micro in share] for share in shares
        ] == [
            [(1, 2, 2)],
            [(0, 0, 1)],
            [(0, 0, 1)],
        ]


class TestPairs:
    def test_the_rows_of_a_pair_stay_together_and_long_pairs_are_micro_batches(self) -> None:
        short, long = ([1, 2], [3]), ([4, 5], [6] * 7)
        batch = replace(make_batch([short, short, short, long, short, short]), paired=True)
        micros = cut(batch, 8)
        # The pair with the long answer has 2 + 8 tokens; the others are 4 rows of 2.
        assert [micro.num_tokens for micro in micros] == [10, 8]
        assert [sorted(set(micro.sequences.sequence_N.tolist())) for micro in micros] == [[2, 3], [0, 1, 4, 5]]

    def test_a_prompt_is_shared_within_a_pair_only(self) -> None:
        prompt = [1, 2, 3, 4, 5, 6]
        batch = replace(make_batch([(prompt, [7, 8]), (prompt, [9, 5])] * 2), paired=True)
        (micro,) = cut(batch, 100, "always")
        assert micro.token_ids_L.tolist() == [*prompt, *prompt, 7, 9, 7, 9]

    def test_half_a_pair_is_refused(self) -> None:
        column = (np.array([1, 2]), np.array([0, 2]))
        with pytest.raises(ValueError, match="1 experiences are no whole number of pairs"):
            pad_batch(
                PackedColumns(
                    token_ids=column,
                    loss_mask=(np.ones(2, bool), np.array([0, 2])),
                    behavior_logprobs=None,
                    rewards=[0.0],
                    group_ids=[0],
                    rollout_index=[0],
                    paired=True,
                )
            )


pairs = st.tuples(st.lists(st.integers(1, 3), max_size=6), st.lists(st.integers(1, 9), max_size=5))


@settings(max_examples=200, deadline=None)
@given(
    experiences=st.lists(pairs, min_size=1, max_size=12),
    max_tokens=st.integers(1, 40),
    sharing=st.sampled_from(["never", "rows", "always"]),
    kernel=st.sampled_from(["segments", "rows"]),
    num_ranks=st.integers(1, 3),
)
def test_every_token_that_counts_is_in_one_micro_batch_and_sees_exactly_its_past(
    experiences: list[tuple[list[int], list[int]]], max_tokens: int, sharing: Sharing, kernel: Kernel, num_ranks: int
) -> None:
    batch = make_batch(experiences)
    cutting = Cutting(max_tokens=max_tokens, sharing=sharing, kernel=kernel, num_ranks=num_ranks)
    micros = [micro for share in split_batch(batch, cutting) for micro in share]
    found: list[tuple[int, tuple[int, ...], int]] = []
    for micro in micros:
        longest = (
            max(len(experiences[b][0]) + len(experiences[b][1]) for b in set(micro.sequences.sequence_N.tolist()))
            if micro.num_tokens
            else 0
        )
        assert micro.num_tokens <= max(max_tokens, longest)
        seen = visible(micro.packing)
        for source, target, b in zip(
            micro.source_N.tolist(), micro.target_N.tolist(), micro.sequences.sequence_N.tolist()
        ):
            past = seen[source].nonzero().flatten()
            past = past[micro.position_ids_L[past].argsort()]
            assert micro.position_ids_L[past].tolist() == list(range(len(past)))
            found.append((b, tuple(micro.token_ids_L[past].tolist()), target))
    expected = [
        (b, tuple(batch.token_ids_BT[b, :t].tolist()), int(batch.token_ids_BT[b, t]))
        for b, t in batch.loss_mask_BT.nonzero().tolist()
    ]
    assert sorted(found) == sorted(expected)
    places = sorted(place for micro in micros for place in micro.index_N.tolist())
    assert places == list(range(batch.num_loss_tokens))
    flat = batch.for_algorithm(1)
    for micro in micros:
        assert torch.equal(flat.sequence_N[micro.index_N], micro.sequences.sequence_N)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
LAYERS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}


def family(model_type: str, **settings: Any) -> PretrainedConfig:
    found: PretrainedConfig = CONFIG_MAPPING[model_type](**SIZES | settings)
    return found


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("recurrent_gemma", "carry a state"),
        ("mimo_v2_flash", "sinks"),
        ("granite_swa", "sinks"),
        ("granitemoe_swa", "sinks"),
        ("doge", "masks attention"),
        ("nemotron", "belong together"),
        ("gemma2", "caps attention"),
        ("gpt_oss", "sinks"),
        ("bloom", "computes attention"),
    ],
)
def test_families_that_cannot_be_packed_are_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"{reason}.*got '{model_type}'"):
        refuse_unpackable(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (family("recurrent_gemma", num_key_value_heads=1, num_hidden_layers=3), "other log-probabilities, by up to"),
        (family("mimo_v2_flash", v_head_dim=8, **LAYERS), "its attention has s_aux"),
        (family("doge"), "its attention has attention_mask"),
        (family("gemma2", **LAYERS), "its attention has softcap"),
        (family("nemotron"), "do not hand it on"),
        (family("bert"), r"between the last hidden states and the logits \(cls\)"),
        (family("modernbert-decoder"), "between the last hidden states and the logits"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_the_trial_detects_families_that_cannot_be_packed(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"{reason}.*name another model"):
        try_packing(config)


@pytest.mark.parametrize(
    "config",
    [
        family("llama"),
        family("qwen3"),
        family("gpt2"),
        family("persimmon", num_key_value_heads=4),
        family("phi"),
        family("gemma3_text", **LAYERS),
        family("cohere2", **LAYERS),
        family(
            "deepseek_v3",
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=16,
            head_dim=4,
            num_key_value_heads=4,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_the_trial_passes_families_that_can_be_packed(config: PretrainedConfig) -> None:
    assert try_packing(config) is None


MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "first_k_dense_replace": 0,
    "num_hidden_layers": 61,
}


@pytest.mark.parametrize(
    "config",
    [
        family("mixtral", **MIXTRAL),
        family("qwen3_moe", hidden_size=4096, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536),
        family("deepseek_v3", **DEEPSEEK_V3),
        family("llama", hidden_size=16384, intermediate_size=65536, num_attention_heads=128, num_key_value_heads=8),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_with_large_layers_is_tried_with_fewer_experts_and_narrower_ones(config: PretrainedConfig) -> None:
    assert try_packing(config) is None


def test_a_narrow_model_of_a_family_that_cannot_be_packed_is_refused_too() -> None:
    large = {"hidden_size": 16384, "intermediate_size": 65536, "num_attention_heads": 128, "num_key_value_heads": 8}
    with pytest.raises(ConfigError, match="its attention has softcap"):
        try_packing(family("gemma2", **LAYERS, **large))


def test_a_model_too_large_for_the_trial_is_not_tried() -> None:
    assert "parameters" in str(try_packing(family("llama", hidden_size=32768, head_dim=None, num_key_value_heads=1)))


def test_a_model_with_a_short_context_is_tried_within_it() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert try_packing(family("llama", max_position_embeddings=8, rope_parameters=rope)) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (family("llama"), True),
        (family("gpt2"), True),
        (family("llama", head_dim=256), True),
        (family("llama", head_dim=512), False),
        (family("llama", head_dim=None, hidden_size=400), False),
        (family("deepseek_v3", **DEEPSEEK_V3), False),
    ],
)
def test_flash_attention_is_used_for_heads_with_kernels(config: PretrainedConfig, expected: bool) -> None:
    assert suits_flash(config) is expected


def test_rotary_frequencies_that_depend_on_the_longest_sequence_limit_the_lengths() -> None:
    assert length_limit(family("llama")) is None
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = family("llama", max_position_embeddings=10, rope_parameters=rope)
    assert length_limit(config) == 10
    refuse_longer(10, 10, config)
    with pytest.raises(ConfigError, match=r"got '11 tokens, llama'.*up to 10 tokens"):
        refuse_longer(11, 10, config)
