"""Gemma 4's assistant: what it computes of the model's hidden states, K and V, and its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from inspection import draft_with
from matrix import usable
from mtp_checks import GREEDY, SAMPLED, check_preempted_and_shifting, check_same, watch_drafts
from rounded_weights import round_weights
from safetensors.numpy import load_file
from tiny_gguf import gemma4_attention, with_vocabulary, write
from tiny_models import make, perturb, save_tokenizer

from edgellm.backends.batch import Span
from edgellm.engine.mtp import AssistantDrafter, MtpHead
from edgellm.errors import ModelFormatError, OptionError, UnsupportedModelError
from edgellm.export import export
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.layer_config import OTHER_MODEL
from edgellm.graphs.tensors import model_tensors
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(not usable("C++"), reason="it needs the C++ kernels")

VOCABULARY, WINDOW = 320, 24
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "sliding_window": WINDOW}
TOKENS = np.random.default_rng(0).integers(3, 256, 400).tolist()
KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class Judge:
    """The published forward in float64: that of the model, and that of its assistant."""

    model: Any
    assistant: Any

    def states(self, tokens: Sequence[int]) -> tuple[Any, Any]:
        """Hidden states of a text, and the K and V that the assistant reads."""
        import torch

        with torch.no_grad():
            found = self.model.model(torch.tensor([tokens]), return_shared_kv_states=True)
        return found.last_hidden_state, found.shared_kv_states

    def draft(self, tokens: Sequence[int], count: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The likeliest tokens behind a text; logits and the hidden state of its last token's row.

        The last token has no K and V yet; a layer with a window sees one position less before it.
        """
        import torch

        hidden, shared = self.states(tokens[:-1])
        seen = {KINDS[0]: slice(-WINDOW + 1, None), KINDS[1]: slice(None)}
        kv = {kind: tuple(x[:, :, seen[kind]] for x in shared[kind]) for kind in KINDS}
        state, last, draft, rows = hidden[:, -1:], torch.tensor([[tokens[-1]]]), list[int](), []
        for _ in range(count):
            with torch.no_grad():
                x = torch.cat([self.model.get_input_embeddings()(last), state], dim=-1)
                found = self.assistant(
                    inputs_embeds=x,
                    position_ids=torch.tensor([[len(tokens) - 1]]),
                    shared_kv_states=kv,
                )
            state, last = found.last_hidden_state, found.logits.argmax(-1)
            rows.append((found.logits[0, 0].numpy(), state[0, 0].numpy()))
            draft.append(int(last))
        return draft, *rows[0]


def make_assistant(folder: Path, backbone: int, width: int = 32) -> Any:
    import torch
    import transformers

    text = transformers.Gemma4TextConfig(
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_kv_shared_layers=3,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        layer_types=[KINDS[0], KINDS[0], KINDS[1]],
        rope_parameters={
            KINDS[1]: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 2e4,
            },
            KINDS[0]: {"rope_type": "default", "rope_theta": 300.0},
        },
        final_logit_softcapping=2.0,  # which has no effect
        **SIZES,
    )
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=backbone)
    torch.manual_seed(1)
    assistant = transformers.Gemma4AssistantForCausalLM(config).eval()
    perturb(assistant)
    folder.mkdir()
    return assistant


def made(
    folder: Path, *, right: bool = False, changes: dict[str, Any] | None = None
) -> tuple[str, str, Judge]:
    """Bundles of a model and of its assistant, which is random, or always right.

    The latter stands beside a model whose layers add nothing, so that the last token alone tells
    the next one: it passes the embedding on.
    """
    import torch

    paths = folder / "model", folder / "assistant"
    model = make("gemma4_text", paths[0], **SIZES, **(changes or {}))
    width = model.config.hidden_size
    assistant = make_assistant(paths[1], width, width if right else 32)
    if right:
        with torch.no_grad():
            for key, weight in (*model.named_parameters(), *assistant.named_parameters()):
                if key.endswith(
                    ("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")
                ):
                    weight.zero_()
            assistant.model.norm.weight.copy_(model.model.norm.weight)
            assistant.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
            assistant.pre_projection.weight.copy_(torch.eye(width, 2 * width))
            inverse = torch.eye(width) / model.model.norm.weight
            assistant.post_projection.weight.copy_(inverse)
    for each, path in zip((model, assistant), paths, strict=True):
        round_weights(each)
        each.save_pretrained(path)
        save_tokenizer(path)
        export(path, path / "bundle", name=path.name, source=str(path))
    bundles = [str(path / "bundle") for path in paths]
    return bundles[0], bundles[1], Judge(model.double(), assistant.double())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Judge]:
    return made(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Judge]:
    return made(tmp_path_factory.mktemp("right"), right=True)


def head_of(llm: LLM) -> MtpHead:
    head = llm.engine.draft_model
    assert isinstance(head, MtpHead)
    assert head.cache is None
    return head


@pytest.mark.parametrize("length", [1, 2, WINDOW, WINDOW + 1, 129, 300])
def test_it_computes_the_published_forward(pair: tuple[str, str, Judge], length: int) -> None:
    """Behind some tokens, at the position of the next one, before and behind the window."""
    path, draft, judge = pair
    tokens = TOKENS[: length + 1]
    _, logits, state = judge.draft(tokens, 1)
    with load(path, draft=draft, kv_format="f32") as llm:
        hidden = judge.states(tokens[:-1])[0][0, -1:].numpy().astype(np.float32)

        def compute() -> tuple[np.ndarray, dict[int, float]]:
            sequence = llm.engine.cache.sequence()
            llm.engine.decoder.run([Span(sequence, tokens[:-1])])
            found, best = head_of(llm).model.run(sequence, tokens[-1:], hidden)
            assert len(sequence) == length
            sequence.close()
            return found[0], best.best(1)

        found, best = llm.engine.thread.call(compute)
    errors = np.abs(found - state) / np.abs(state).max()
    assert np.median(errors) < 0.03
    assert errors.max() < 0.1
    ((token, logprob),) = best.items()
    assert logits.max() - logits[token] < 0.05 * np.abs(logits).max()
    exact = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert logprob == pytest.approx(exact, abs=0.05 * np.abs(logits).max())


def test_drafts_are_those_of_the_published_one(
    pair: tuple[str, str, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chat, whose next turn begins in the KV cache, and behind rejected drafts."""
    path, draft, judge = pair
    seen = watch_drafts(monkeypatch, AssistantDrafter)
    with load(path, draft=draft, kv_format="f32", draft_p_min=0) as llm, llm.session() as session:
        for begin in (0, 100):
            session.append(TOKENS[begin : begin + 20])
            session.generate(**(GREEDY | {"max_tokens": 8}))
        text = list(session.tokens)
    found, expected = list[int](), list[int]()
    for tokens, guess in seen:
        assert tokens == text[: len(tokens)]
        found += guess
        expected += judge.draft(tokens, len(guess))[0] if guess else []
    assert len(found) > 30
    assert np.mean(np.equal(found, expected)) > 0.8


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["pair", "right"])
def test_the_answer_is_the_same(
    kind: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path, draft, _ = request.getfixturevalue(kind)
    with load(path, draft=draft, draft_p_min=0) as llm:
        check_same(llm, TOKENS, options)


@pytest.mark.parametrize("kv_format", ["int8", "k4v4"])
def test_one_that_is_right_is_accepted(right: tuple[str, str, Judge], kv_format: Any) -> None:
    with (
        load(right[0], draft=right[1], draft_p_min=0, kv_format=kv_format) as llm,
        pytest.MonkeyPatch.context() as patch,
        llm.session() as session,
    ):
        draft_with(patch, "mtp")
        for begin in (0, 130, 270):
            session.append(TOKENS[begin : begin + 100])
            counts = session.generate(**GREEDY).stats.drafts["mtp"]
            assert counts.accepted > 0.8 * counts.drafted > 15


def test_it_reads_a_condensed_context(right: tuple[str, str, Judge]) -> None:
    with (
        load(right[0], draft=right[1], draft_p_min=0) as llm,
        pytest.MonkeyPatch.context() as patch,
        llm.session() as session,
    ):
        draft_with(patch, "mtp")
        session.append(TOKENS[:300])
        session.condense(1)  # all rows, in blocks of heads
        counts = session.generate(**GREEDY).stats.drafts["mtp"]
        assert counts.accepted > 0.8 * counts.drafted > 15


def test_an_answer_that_is_preempted_or_shifts(
    right: tuple[str, str, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(right[0], draft=right[1], ctx_size=256, draft_p_min=0) as llm:
        check_preempted_and_shifting(llm, TOKENS[:200], monkeypatch)


def file_of(folder: Path) -> Path:
    """The GGUF file that llama.cpp's converter makes of an assistant's folder."""
    path = folder / "m.gguf"
    w = gguf.GGUFWriter(path, "gemma4-assistant")
    for key, value in {
        "context_length": 512,
        "embedding_length": 32,
        "embedding_length_out": 64,
        "nextn_predict_layers": 3,
        "block_count": 3,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.shared_kv_layers": 3,
    }.items():
        w.add_uint32(f"gemma4-assistant.{key}", value)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-6)

    def keys(writer: gguf.GGUFWriter) -> None:
        gemma4_attention(writer, layers=3, window=WINDOW)

    with_vocabulary(keys)(w)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 3)
    own = {"pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection"}
    for key, values in load_file(folder / "model.safetensors").items():
        module = key.removesuffix(".weight")
        name = own.get(module) or names.get_name(module)
        assert name is not None, key
        w.add_tensor(f"{name}.weight", values)
    w.add_tensor("masked_embd_centroids.weight", np.zeros((4, 32), np.float32))
    write(w)
    return path


def test_folders_and_files_are_the_same(pair: tuple[str, str, Judge]) -> None:
    folder = Path(pair[1]).parent
    one, other = open_checkpoint(folder), open_checkpoint(file_of(folder))
    config = other.config
    assert replace(one.config, norm_eps=config.norm_eps) == config
    assert config.backbone == 64
    assert config.logit_softcap is None
    assert [each.kv_from for each in config.attentions.values()] == [OTHER_MODEL] * 3
    for name in model_tensors(config):
        assert "k_" not in name
        np.testing.assert_array_equal(one.tensor(name).float32(), other.tensor(name).float32())


def test_it_answers_nothing_by_itself(pair: tuple[str, str, Judge]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"drafts for another one.*`draft` of that one"):
        load(pair[1])


@pytest.mark.parametrize("changes", [{"hidden_size": 96}, {"num_key_value_heads": 4}])
def test_one_of_another_model_is_refused(
    pair: tuple[str, str, Judge], tmp_path: Path, changes: dict[str, Any]
) -> None:
    make("gemma4_text", tmp_path, **SIZES, **changes)
    save_tokenizer(tmp_path)
    with pytest.raises(OptionError, match=r"reads hidden states of 64 numbers, K and V of another"):
        load(str(tmp_path), draft=pair[1])


def test_all_or_no_layers_read_another_model(pair: tuple[str, str, Judge]) -> None:
    config = open_checkpoint(Path(pair[1]).parent).config
    with pytest.raises(ModelFormatError, match="backbone is None; all layers of a model with a"):
        replace(config, backbone=None)
