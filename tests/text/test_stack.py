import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dgpp_core.api.errors import TokenizerError
from dgpp_core.api.spec import Dialect
from dgpp_core.text.stack import load_text, starts_in_reasoning

THINK = ("<think>", "</think>")
IGNORES = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{{ strftime_now('%Y') }}"


def with_template(folder: Path, to: Path, source: str | None) -> Path:
    shutil.copy(folder / "tokenizer.json", to)
    if source is not None:
        (to / "chat_template.jinja").write_text(source, encoding="utf-8")
    return to


def test_everything_of_a_checkpoint(folder: Path) -> None:
    stack = load_text(folder, None, config_eos=(5,))
    assert stack.template is not None
    assert stack.reasoning == THINK
    assert stack.switches.thinking == ("enable_thinking",)
    assert stack.defaults.eos_ids == (5,)
    prompt = stack.template.render([{"role": "user", "content": "x"}])
    assert starts_in_reasoning(prompt, stack.reasoning)
    prompt = stack.template.render([{"role": "user", "content": "x"}], kwargs={"enable_thinking": False})
    assert not starts_in_reasoning(prompt, stack.reasoning)


def test_the_checkpoints_template_goes_before_the_dialects(folder: Path, tmp_path: Path) -> None:
    dialect = Dialect(chat_template="{{ 'dialect' }}", reasoning=("[A]", "[B]"))
    own = load_text(with_template(folder, tmp_path, "{{ 'own' }}"), dialect, config_eos=())
    assert own.template is not None
    assert own.template.render([]) == "own"
    assert own.reasoning == ("[A]", "[B]")
    (tmp_path / "chat_template.jinja").unlink()
    other = load_text(tmp_path, dialect, config_eos=())
    assert other.template is not None
    assert other.template.render([]) == "dialect"
    assert load_text(tmp_path, None, config_eos=()).template is None


def test_a_switch_that_changes_nothing_is_not_offered(folder: Path, tmp_path: Path) -> None:
    dialect = Dialect(thinking_switches=("enable_thinking", "thinking"))
    clock = lambda: datetime(2026, 1, 1, tzinfo=UTC)  # noqa: E731
    stack = load_text(with_template(folder, tmp_path, IGNORES), dialect, config_eos=(), clock=clock)
    assert stack.switches.thinking == ()
    assert stack.template is not None
    assert stack.template.render([]) == "2026"
    reads = "{% if thinking %}{% endif %}{% if enable_thinking %}on{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(reads, encoding="utf-8")
    assert load_text(tmp_path, dialect, config_eos=()).switches.thinking == ("enable_thinking",)


@pytest.mark.parametrize("raw", [b"{% if %}", b"\xff\xfe", b"{{ 'x'"])
def test_a_broken_template_names_its_file(folder: Path, tmp_path: Path, raw: bytes) -> None:
    with_template(folder, tmp_path, "")
    (tmp_path / "chat_template.jinja").write_bytes(raw)
    with pytest.raises(TokenizerError) as caught:
        load_text(tmp_path, None, config_eos=())
    assert caught.value.where.startswith(str(tmp_path / "chat_template.jinja"))


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("a<think>", True), ("a<think>\n", True), ("<think>\n\n</think>\n\n", False), ("<think>x", False), ("", False),
        ("<think>\n\n", False), ("<think></think>", False), ("say <think> now\n<bot>", False),
    ],
)  # fmt: skip
def test_where_a_reply_starts(prompt: str, inside: bool) -> None:
    assert starts_in_reasoning(prompt, THINK) is inside
    assert not starts_in_reasoning(prompt, None)
