"""The site file's syntax and rules; errors name file and line and never show lines that are not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgpp_core.api.errors import ConfigError
from dgpp_core.config.site import Site, read_site


def site(folder: Path, text: str, **environ: str) -> Site:
    path = folder / "site.env"
    path.write_text(text, encoding="utf-8")
    return read_site(path, environ)


def refusal(folder: Path, text: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        site(folder, text, **environ)
    return caught.value


def test_syntax(tmp_path: Path) -> None:
    found = site(
        tmp_path,
        "# a comment\n\n"
        "export DGPP_NODES='spark-0 spark-1'   # two of them\n"
        'DGPP_SSH_USER="me"\n'
        "DGPP_HTTP_PORT=8000 # inline\n"
        "  DGPP_LOG_DIR=/var/log#1\n"
        "DGPP_DATA_DIR=$HOME/`x`\n"
        "DGPP_CLUSTER_CONFIG='a # b.json'\n",
    )
    assert found.nodes == ("spark-0", "spark-1")
    assert (found.ssh_user, found.http_port, found.log_dir) == ("me", 8000, "/var/log#1")
    assert found.data_dir == "$HOME/`x`"
    assert found.cluster_config == "a # b.json"


def test_foreign_keys_are_skipped_unread_whatever_they_hold(tmp_path: Path) -> None:
    found = site(tmp_path, "HF_TOKEN='unclosed\nOTHER=1\nOTHER=2\nDGPP_HTTP_PORT=8001\n")
    assert found.http_port == 8001


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("DGPP_HTTP_PORT=1\nDGPP_HTTP_PORT=2\n", 2, "DGPP_HTTP_PORT is set twice"),
        ("\nDGPP_NODES='a b\n", 2, "no closing quote"),
        ("DGPP_NODES='a' b\n", 1, "text after the closing quote"),
        ("DGPP_HTTP_PORT\n", 1, "not a setting"),
        ("DGPP_HTTP_PORT = 80\n", 1, "not a setting"),
        ("DGPP_HTTP_PORT=0\n", 1, "DGPP_HTTP_PORT has a value that is not allowed"),
        ("DGPP_HTTP_PORT=\n", 1, "DGPP_HTTP_PORT"),
        ("DGPP_HTTP_PORT=80x\n", 1, "DGPP_HTTP_PORT"),
        ("DGPP_HTTP_BIND=localhost\n", 1, "DGPP_HTTP_BIND"),
        ("DGPP_NODES=a a\n", 1, "DGPP_NODES"),
        ("DGPP_NODES=-a\n", 1, "DGPP_NODES"),
        ("DGPP_SSH_USER=me;rm\n", 1, "DGPP_SSH_USER"),
        ("DGPP_STAGE_DIR=relative\n", 1, "DGPP_STAGE_DIR"),
        ("DGPP_STAGE_DIR=/a/../b\n", 1, "DGPP_STAGE_DIR"),
        ("DGPP_RELEASE_DIR=~/a b\n", 1, "DGPP_RELEASE_DIR"),
        ("HF_HOME=cache\n", 1, "HF_HOME"),
        ("DGPP_LOG_LEVEL=loud\n", 1, "DGPP_LOG_LEVEL"),
        ("DGPP_ROCE_DEVICES=a b c\n", 1, "DGPP_ROCE_DEVICES"),
        ("DGPP_ROCE_DEVICES=a b\nDGPP_ROCE_GID_INDICES=3\n", 2, "differ in number"),
        ("DGPP_ROCE_DEVICES=a\nDGPP_ROCE_GID_INDICES=256\n", 2, "DGPP_ROCE_GID_INDICES"),
        ("DGPP_FABRIC_PORT=7000\nDGPP_JOURNAL_PORT=7000\n", 2, "are the same"),
        ("DGPP_FABRIC_PORT=29971\n", 1, "are the same"),
        ("DGPP_NODE_OVERRIDES={\n", 1, "DGPP_NODE_OVERRIDES"),
        ('DGPP_NODES=a\nDGPP_NODE_OVERRIDES={"b": {}}\n', 2, "unknown node"),
        ('DGPP_NODES=a\nDGPP_NODE_OVERRIDES={"a": {"DGPP_HTTP_PORT": "1"}}\n', 2, "not a node's own"),
        ('DGPP_NODES=a\nDGPP_NODE_OVERRIDES={"a": {"DGPP_MLOCK": "maybe"}}\n', 2, "DGPP_MLOCK"),
        ('DGPP_NODES=a\nDGPP_NODE_OVERRIDES={"a": {"DGPP_MLOCK": 1}}\n', 2, "DGPP_NODE_OVERRIDES"),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    error = refusal(tmp_path, text)
    assert what in error.what
    assert f"{tmp_path / 'site.env'}, line {line}" in error.where
    assert error.expected or error.found


def test_a_line_that_is_no_setting_is_not_shown(tmp_path: Path) -> None:
    assert "hunter2" not in str(refusal(tmp_path, "password: hunter2\n"))


def test_exported_variables_override_the_file_and_are_checked(tmp_path: Path) -> None:
    assert site(tmp_path, "DGPP_HTTP_PORT=1\n", DGPP_HTTP_PORT="2").http_port == 2
    assert site(tmp_path, "DGPP_HTTP_PORT=1\n", DGPP_HTTP_PORT="").http_port == 1
    assert "environment variable DGPP_HTTP_PORT" in refusal(tmp_path, "", DGPP_HTTP_PORT="x").where


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    assert read_site(None, {}, tmp_path) == Site()
    (tmp_path / ".env").write_text("DGPP_HTTP_PORT=1234\n")
    assert read_site(None, {}, tmp_path).http_port == 1234
    (tmp_path / "other").write_text("DGPP_HTTP_PORT=4321\n")
    assert read_site(None, {"DGPP_ENV_FILE": str(tmp_path / "other")}, tmp_path).http_port == 4321
    with pytest.raises(ConfigError) as caught:
        read_site(None, {"DGPP_ENV_FILE": str(tmp_path / "none")}, tmp_path)
    assert caught.value.where == str(tmp_path / "none")


def test_the_hub_cache_wins_over_the_hub_home(tmp_path: Path) -> None:
    assert site(tmp_path, "HF_HOME=~/hf/\n").hub_cache == "~/hf/hub"
    found = site(tmp_path, "HF_HOME=~/hf\nHF_HUB_CACHE=/c\n")
    assert found.hub_cache == "/c"
    assert found.node_settings == {"HF_HUB_CACHE": "/c"}
