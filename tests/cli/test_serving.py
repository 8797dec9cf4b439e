"""``dgpp plan``, ``resolve`` and ``synth``: what the command line asks for is what is planned, printed and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from dgpp_core.api import ConfigError, PluginError
from dgpp_core.checkpoint.headers import DTYPE_BITS
from dgpp_core.cli.main import cli
from dgpp_core.cli.options import CAPACITY, HTTP, OWN_NAMES, SERVICE
from dgpp_core.cli.serving import choose, serve_options, world_options
from dgpp_core.cli.synth import in_format, number_formats, shortened
from dgpp_core.config.fabric import Fabric
from dgpp_core.config.settings import IDLE_KEYS, EngineSettings, HttpSettings
from dgpp_core.engine.factory import prepare
from dgpp_core.host.loading import LoadedModel, PluginHost, load_plugins
from dgpp_core.server.options import SamplingOverrides

GIB = 2**30


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No site file, no exported settings and an empty Hugging Face cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("DGPP_ENV_FILE", "DGPP_CLUSTER_CONFIG", "DGPP_HTTP_PORT", "DGPP_NODES", "DGPP_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host(toy: LoadedModel) -> PluginHost:
    return load_plugins(environ={})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def deployment(path: Path, **content: Any) -> str:
    path.write_text(json.dumps({"world_size": 1, **content}))
    return str(path)


# plan


def test_a_plan_that_fits() -> None:
    done = run("plan", "--plugin", "smollm2", "--available", str(64 * GIB), "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert "the plan fits" in done.output
    assert "weights: linear" in done.output


def test_a_plan_that_does_not_fit_is_exit_1_with_table_and_advice() -> None:
    done = run("plan", "--plugin", "smollm2", "--available", str(GIB), "--device", "cpu")
    assert done.exit_code == 1
    assert "the plan does not fit" in done.stdout
    assert "kv_capacity" in done.stderr.split("next step")[1]


def test_a_plan_that_nobody_could_be_served_by_is_refused_as_serving_would() -> None:
    done = run("plan", "--plugin", "smollm2", "--device", "cpu", "--kv-capacity", "1", "--block-tokens", "1")
    assert done.exit_code == 2
    assert "no request fits the KV pool" in done.stderr


def test_a_plan_of_wider_decode_steps_than_a_gpu_takes_is_refused() -> None:
    arguments = ("plan", "--plugin", "glm47", "--device", "cuda", "--available", str(2**50))
    done = run(*arguments, "--max-concurrency", "1024", "--mtp-depth", "5", "--mtp-schedule")
    assert done.exit_code == 2
    assert "too many rows" in done.stderr
    assert "42 or less" in done.stderr
    assert run(*arguments, "--max-concurrency", "42", "--mtp-depth", "5", "--mtp-schedule").exit_code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose memory is asked")
def test_the_plan_of_a_gpu_that_is_not_here_asks_for_its_memory() -> None:
    done = run("plan", "--plugin", "smollm2", "--device", "cuda")
    assert done.exit_code == 2
    assert "--available" in done.stderr
    assert run("plan", "--plugin", "smollm2", "--device", "cuda", "--available", str(64 * GIB)).exit_code == 0
    assert run("plan", "--plugin", "smollm2", "--device", "auto").exit_code == 0


def test_the_advice_of_a_plan_is_right() -> None:
    arguments = ("plan", "--plugin", "smollm2", "--available", str(3 * GIB // 2), "--device", "cpu", "--json")
    plan = json.loads(run(*arguments).stdout)
    largest, block = plan["largest_kv_capacity"], EngineSettings().block_tokens
    assert 0 < largest < EngineSettings().kv_capacity
    assert run(*arguments, f"--kv-capacity={largest}").exit_code == 0
    assert run(*arguments, f"--kv-capacity={largest + block}").exit_code == 1


def test_json_of_a_plan_that_does_not_fit_has_plan_and_error() -> None:
    done = run("plan", "--plugin", "smollm2", "--available", "1000", "--device", "cpu", "--json")
    assert done.exit_code == 1
    plan = json.loads(done.stdout)
    assert plan["fits"] is False
    assert plan["total"] == sum(line["bytes"] for line in plan["lines"])
    assert json.loads(done.stderr)["error"]["type"] == "PlanError"


def test_a_plan_reads_the_checkpoints_config(toy_checkpoint: Path) -> None:
    def total(*arguments: str) -> int:
        done = run("plan", "--device=cpu", f"--available={64 * GIB}", "--json", *arguments)
        assert done.exit_code == 0, done.stderr
        return int(json.loads(done.stdout)["total"])

    assert total(f"--checkpoint={toy_checkpoint}") < total("--plugin=toy")
    assert total(f"--checkpoint={toy_checkpoint}") == total(f"--checkpoint={toy_checkpoint}", "--plugin=toy")


def test_a_rank_of_two_needs_less_than_one_alone(toy: LoadedModel, tmp_path: Path) -> None:
    totals = []
    for world in (1, 2):
        file = deployment(tmp_path / f"{world}.json", model=toy.spec.repository, world_size=world)
        env = {"DGPP_NODES": "a b"}
        arguments = ["plan", "--config", file, "--device=cpu", f"--available={64 * GIB}", "--json"]
        done = CliRunner().invoke(cli, arguments, env=env)
        assert done.exit_code == 0, done.stderr
        totals.append(json.loads(done.stdout)["total"])
    assert totals[1] < totals[0]


# resolve


def resolved(*arguments: str) -> dict[str, Any]:
    done = run("resolve", *arguments)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def other_value(field: msgspec.inspect.Field) -> Any:
    """An allowed value that is not the default."""
    match field.type:
        case msgspec.inspect.BoolType():
            return not field.default
        case msgspec.inspect.LiteralType(values=values):
            return next(value for value in values if value != field.default)
        case msgspec.inspect.StrType():
            return "other"
        case msgspec.inspect.IntType():
            return field.default + 1 if field.default != -1 else 7
        case msgspec.inspect.FloatType(le=1):
            return field.default / 2
        case _:
            return field.default + 1.5


def struct_fields(kind: type) -> dict[str, msgspec.inspect.Field]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: field for field in info.fields}


OPTIONS = [
    *((EngineSettings, "engine", name) for name in (*CAPACITY, *SERVICE)),
    *((HttpSettings, "http", name) for name in HTTP),
]


@pytest.mark.parametrize(("kind", "section", "name"), OPTIONS)
def test_every_option_reaches_its_setting(kind: type, section: str, name: str) -> None:
    value = other_value(struct_fields(kind)[name])
    flag = OWN_NAMES.get(name, name.replace("_", "-"))
    arguments = [f"--{flag}={value}"]
    if isinstance(value, bool):
        arguments = [f"--{flag}" if value else f"--no-{flag}"]
    if name == "prefill_idle_budget_tokens":
        value, arguments = 512, ["--prefill-idle-budget-tokens=512"]
    if name == "mtp_schedule_min_depth":
        value, arguments = 2, ["--mtp-schedule-min-depth=2", "--mtp-depth=2"]
    assert resolved("--plugin", "smollm2", *arguments)[section][name] == value


def test_every_setting_that_acts_has_an_option() -> None:
    objects = {"file_inputs", "image_inputs", "rope_scaling"}
    without = {"mtp", *objects, *IDLE_KEYS}  # mtp is --no-mtp; the last act on nothing yet
    assert {*CAPACITY, *SERVICE} == {*EngineSettings.__struct_fields__} - without


def test_a_world_that_the_model_cannot_be_divided_among_is_refused_once_before_a_rank_starts(
    toy: LoadedModel, toy_checkpoint: Path
) -> None:
    for line in (["plan"], ["serve", "--checkpoint", str(toy_checkpoint), "--port", "1"]):
        done = run(*line, "--plugin", "toy", "--world", "7")
        assert done.exit_code == 1, done.stderr
        assert done.stderr.count("cannot be divided among 7 ranks") == 1
        assert "7" not in done.stderr.partition("divides the model: ")[2]
        assert "waiting" not in done.stderr
        assert "start" not in done.stderr


def test_switches_turn_off() -> None:
    engine = resolved("--plugin", "smollm2", "--no-mtp", "--no-prefix-cache")["engine"]
    assert (engine["mtp"], engine["prefix_cache_gib"]) == (False, 0.0)


def test_flags_go_before_the_file_and_the_file_before_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("DGPP_HTTP_PORT=1111\nDGPP_HTTP_BIND=0.0.0.0\n")
    file = deployment(tmp_path / "d.json", model="a/b", http={"port": 2222}, engine={"queue_limit": 5})
    assert resolved("--config", file)["http"]["port"] == 2222
    assert resolved("--config", file)["http"]["bind_host"] == "0.0.0.0"
    found = resolved("--config", file, "--port", "3333", "--host", "127.0.0.2", "--queue-limit", "6")
    assert (found["http"]["port"], found["http"]["bind_host"]) == (3333, "127.0.0.2")
    assert found["engine"]["queue_limit"] == 6
    monkeypatch.setenv("DGPP_CLUSTER_CONFIG", file)
    assert resolved()["model"] == "a/b"


def test_a_key_of_the_site_that_the_deployment_goes_before_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = deployment(tmp_path / "d.json", model="a/b", http={"port": 2222, "bind_host": "0.0.0.0"})
    assert run("resolve", "--config", file).stderr == "", "the site names neither"
    (tmp_path / ".env").write_text("DGPP_HTTP_PORT=18080\nDGPP_HTTP_BIND=0.0.0.0\n")
    line = "warning: the deployment's http.port 2222 goes before DGPP_HTTP_PORT 18080\n"
    assert run("resolve", "--config", file).stderr == line, "the default, but named; the other is the same"
    assert run("resolve", "--config", file, "--port", "3333").stderr == "", "a flag is meant"
    monkeypatch.setenv("DGPP_HTTP_PORT", "2222")
    assert run("resolve", "--config", file).stderr == ""


def test_a_key_that_acts_on_nothing_is_named(tmp_path: Path) -> None:
    file = deployment(tmp_path / "d.json", model="a/b", engine={"bulk_inflight": 4})
    assert run("resolve", "--config", file).stderr == "warning: engine.bulk_inflight has no effect in this version\n"
    file = deployment(tmp_path / "d.json", model="a/b", engine={"mtp_schedule_lambda": 0.045})
    line = "warning: engine.mtp_schedule_lambda has no effect without `mtp_schedule`\n"
    assert run("resolve", "--config", file).stderr == line
    assert run("resolve", "--config", file, "--mtp-schedule").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "nothing says which model"),
        (("--plugin", "smollm3"), 1, "did you mean `smollm2`?"),
        (("--plugin", "smollm2", "--kv-capacity", "0"), 2, "kv_capacity"),
        (("--plugin", "smollm2", "--host", "localhost"), 2, "bind_host"),
        (("--config", "absent.json"), 2, "absent.json"),
        (("--checkpoint", "absent"), 1, "neither a folder nor in the Hugging Face cache"),
    ],
)
def test_what_cannot_be_resolved_is_named(arguments: tuple[str, ...], code: int, text: str) -> None:
    done = run("resolve", *arguments)
    assert done.exit_code == code
    assert text in done.stderr
    assert done.stdout == ""


# choosing


def pick(host: PluginHost, **named: Any) -> str:
    chosen = choose(host, {}, **{"plugin": None, "config": None, "checkpoint": None, **named})
    return chosen.model.spec.name


def test_the_model_is_found_by_plugin_repository_or_architecture(
    host: PluginHost, toy: LoadedModel, toy_checkpoint: Path, tmp_path: Path
) -> None:
    assert pick(host, plugin="toy") == "toy"
    assert pick(host, checkpoint=str(toy_checkpoint)) == "toy"
    assert pick(host, checkpoint=toy.spec.repository) == "toy"
    assert pick(host, config=Path(deployment(tmp_path / "a.json", model=toy.spec.repository))) == "toy"
    assert pick(host, config=Path(deployment(tmp_path / "b.json", model=str(toy_checkpoint)))) == "toy"


def test_a_checkpoint_that_no_plugin_serves_is_named(host: PluginHost, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodysModel"]}')
    with pytest.raises(PluginError, match="no installed plugin accepts the architecture NobodysModel"):
        pick(host, checkpoint=str(tmp_path))
    for content in ("{}", '{"architectures": "X"}', '{"architectures": [1]}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="`architectures` does not name the model"):
            pick(host, checkpoint=str(tmp_path))


def test_what_is_served_is_what_was_asked_for(host: PluginHost, toy_checkpoint: Path) -> None:
    chosen = choose(
        host,
        {},
        plugin="toy",
        config=None,
        checkpoint=str(toy_checkpoint),
        max_concurrency=3,
        model_alias="mine",
        port=99,
    )
    options = serve_options(chosen, toy_checkpoint, SamplingOverrides(temperature=0.0), seed=7)
    assert (options.model, options.served_id, options.checkpoint) == ("toy", "mine", str(toy_checkpoint))
    assert (options.slots, options.http.port, options.device, options.seed) == (3, 99, "auto", 7)
    assert options.config_eos == (257,)
    assert options.image_cache == str(Path.home() / ".cache/dgpp/resident")
    assert serve_options(chosen, toy_checkpoint, SamplingOverrides(), None, image=False).image_cache == ""
    assert msgspec.json.decode(options.settings, type=EngineSettings) == chosen.resolved.engine


def test_ranks_of_other_hosts_are_waited_for_and_not_started(
    host: PluginHost, toy: LoadedModel, tmp_path: Path
) -> None:
    file = Path(deployment(tmp_path / "d.json", model=toy.spec.repository, world_size=2))
    two = choose(host, {"DGPP_NODES": "a b"}, plugin=None, config=file, checkpoint=None)
    with pytest.raises(ConfigError, match="other hosts") as raised:
        world_options(two, None, 1, None)
    assert "a, b" in raised.value.found
    led = world_options(two, "0.0.0.0:29971", 7, str(tmp_path))
    assert led is not None
    assert (led.size, led.here, led.epoch, led.fabric_port) == (2, 1, 7, two.resolved.ports.fabric)


def test_a_world_is_started_on_this_host(host: PluginHost, toy_checkpoint: Path) -> None:
    given = {"plugin": "toy", "config": None, "checkpoint": str(toy_checkpoint)}
    four = choose(host, {}, **given, world=4)  # type: ignore[arg-type]
    here = world_options(four, None, 1, None)
    assert here is not None
    assert (here.size, here.here, here.rendezvous, here.log_dir) == (
        4,
        4,
        "",
        f"{four.resolved.paths.log_dir}/port-{four.resolved.http.port}",
    )
    one = choose(host, {}, **given)  # type: ignore[arg-type]
    assert world_options(one, None, 1, None) is None
    with pytest.raises(ConfigError, match="world of one"):
        world_options(one, "127.0.0.1:1", 1, None)


@pytest.mark.parametrize(
    ("flag", "environ", "fabric"),
    [
        (None, {}, Fabric()),
        (None, {"DGPP_BUS": "gloo"}, Fabric(bus="gloo")),
        ("shm", {"DGPP_BUS": "gloo"}, Fabric(bus="shm")),
        (
            "verbs",
            {"DGPP_ROCE_DEVICES": "b a", "DGPP_ROCE_GID_INDICES": "3 1"},
            Fabric(bus="verbs", devices=("b", "a"), gid_indices=(3, 1)),
        ),
    ],
)
def test_a_flag_goes_before_the_sites_transport(
    host: PluginHost, toy_checkpoint: Path, flag: str | None, environ: Mapping[str, str], fabric: Fabric
) -> None:
    chosen = choose(host, environ, plugin="toy", config=None, checkpoint=str(toy_checkpoint), world=2, bus=flag)
    world = world_options(chosen, None, 1, None)
    assert world is not None
    assert world.fabric == fabric


def test_the_transport_is_shown() -> None:
    assert resolved("--plugin", "smollm2", "--bus", "verbs")["bus"] == "verbs"
    assert resolved("--plugin", "smollm2")["bus"] == "auto"


def test_what_is_no_transport_is_refused(host: PluginHost, toy_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="DGPP_BUS has a value that is not allowed") as raised:
        choose(host, {"DGPP_BUS": "mpi"}, plugin="toy", config=None, checkpoint=str(toy_checkpoint))
    assert "auto, shm, verbs, nccl, gloo" in raised.value.expected
    with pytest.raises(ConfigError, match="--bus names no transport"):
        choose(host, {}, plugin="toy", config=None, checkpoint=str(toy_checkpoint), bus="mpi")


# synth


@pytest.fixture
def synth(tmp_path: Path, toy: LoadedModel) -> Callable[..., Path]:
    def write(*arguments: str) -> Path:
        folder = tmp_path / f"made-{len(list(tmp_path.iterdir()))}"
        done = run("synth", "toy", str(folder), "--json", *arguments)
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["folder"] == str(folder)
        return folder

    return write


def test_a_synthesised_checkpoint_can_be_loaded(toy: LoadedModel, synth: Callable[..., Path]) -> None:
    for arguments, layers, dtype in (
        ((), 8, "BF16"),
        (("--tiny",), 4, "BF16"),
        (("--layers=2", "--format=f32"), 2, "F32"),
    ):
        prepared = prepare(toy, synth(*arguments), EngineSettings())
        assert prepared.config.num_hidden_layers == layers  # type: ignore[attr-defined]
        assert {entry.dtype for entry in prepared.entries.values()} == {dtype}


def test_the_seed_decides_the_weights(synth: Callable[..., Path]) -> None:
    first, same, other = (synth("--tiny", f"--seed={seed}") for seed in (1, 1, 2))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, same, other)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tiny", "--layers", "1"), "two different models"),
        (("--layers", "9"), "expected: 1..8"),
        (("--format", "f8_e4m3"), "expected: one of bf16, f16, f32"),
        (("--format", "nvfp4"), "found: nvfp4"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused(
    toy: LoadedModel, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    done = run("synth", "toy", str(tmp_path / "new"), *arguments)
    assert done.exit_code == 2
    assert text in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_folder_with_files_is_left_alone(toy: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = run("synth", "toy", str(tmp_path), "--tiny")
    assert done.exit_code == 2
    assert "not empty" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_lists_with_an_entry_a_layer_are_cut_with_the_layers(toy: LoadedModel) -> None:
    config = {**toy.spec.full_config, "layer_types": list("abcdefgh"), "other": [1, 2]}
    short = shortened(msgspec.structs.replace(toy.spec, full_config=config), 2)
    assert (short["num_hidden_layers"], short["layer_types"], short["other"]) == (2, ["a", "b"], [1, 2])


def test_a_weight_format_is_what_config_json_says_of_it(toy: LoadedModel) -> None:
    """The rules of the layer after the last, a draft layer, stay with it however many layers there are."""
    rules = {"quant_method": "acme", "ignore": ["lm_head", "model.layers.8*", "model.layers.18.x", "layers.80"]}
    spec = msgspec.structs.replace(toy.spec, quantised={"nvfp4": rules})
    config, dtype = in_format(spec, shortened(spec, 2), "nvfp4")
    assert dtype == "BF16"
    assert config["num_hidden_layers"] == 2
    assert config["quantization_config"] == rules | {
        "ignore": ["lm_head", "model.layers.2*", "model.layers.18.x", "layers.80"]
    }
    assert in_format(spec, spec.full_config, "nvfp4")[0]["quantization_config"] == rules
    assert in_format(spec, config, "f32") == (shortened(spec, 2), "F32")
    quantised = msgspec.structs.replace(spec, full_config={**spec.full_config, "quantization_config": rules})
    assert shortened(quantised, 2) == config
    with pytest.raises(ConfigError) as caught:
        in_format(spec, config, "nf4")
    assert (caught.value.found, caught.value.expected.endswith("nvfp4")) == ("nf4", True)


# what is said to whoever asks for the wrong thing


def hint(*arguments: str) -> str:
    """The next step that a command names which is refused."""
    done = run(*arguments, "--json") if arguments[0] != "serve" else run(*arguments)
    assert done.exit_code in (1, 2), done.output
    if arguments[0] != "serve":
        return str(json.loads(done.stderr)["error"]["hint"])
    return done.stderr.split("next step: ")[1].strip()


@pytest.mark.parametrize("name", sorted(load_plugins(environ={}).models()))
def test_the_formats_that_are_listed_are_those_that_can_be_written(name: str) -> None:
    model = load_plugins(environ={}).model(name)
    numbers = number_formats(model)
    with pytest.raises(ConfigError) as caught:
        in_format(model.spec, model.spec.tiny_config, "fp3", numbers)
    listed = caught.value.expected.removeprefix("one of ").split(", ")
    assert caught.value.hint
    assert len(set(listed)) == len(listed)
    assert {"bf16", "f32", *model.spec.quantised} <= set(listed)
    assert not {"bool", "u8", "i8", "f4"} & {*listed} - {*model.spec.quantised}
    for form in listed:
        config, dtype = in_format(model.spec, model.spec.tiny_config, form, numbers)
        table = model.bindings(model.read_config(config))
        assert any(b.storage != "dense" or dtype in b.formats for b in table.tensors)
    for form in {kind.lower() for kind in DTYPE_BITS} - {*listed}:
        with pytest.raises(ConfigError):
            in_format(model.spec, model.spec.tiny_config, form, numbers)


def test_a_wrong_format_gets_the_nearest_or_the_default() -> None:
    assert hint("synth", "glm47", "--tiny", "--format", "fp3", "./x") == "did you mean `fp8`?"
    assert "leave --format out" in hint("synth", "glm47", "--tiny", "--format", "q", "./x")


def test_next_steps_of_a_wrong_name_or_value() -> None:
    assert hint("synth", "llama", "--tiny", "./x") == "`llama` is a plugin: name a model of it, smollm2"
    assert "18080" in hint("serve", "--plugin", "smollm2", "--port", "99999")
    assert "leave it out" in hint("serve", "--plugin", "smollm2", "--kv-capacity", "0")
    assert "dgpp plugins list" in hint("plugins", "check", "nosuch")
    assert hint("plugins", "check", "lama") == "did you mean `llama`?"


def test_a_model_without_a_checkpoint_names_the_ways_to_one() -> None:
    told = hint("serve", "--plugin", "glm47", "--offline")
    for way in ("hf download nvidia/GLM-4.7-NVFP4", "--checkpoint DIR", "dgpp synth glm47 --tiny DIR"):
        assert way in told


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    tiny = load_plugins(environ={}).models()["glm47"].tiny_config
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    for other in ("glm53", "smollm2", "qwen38-flash-next"):
        assert hint("plan", "--plugin", other, "--checkpoint", str(tmp_path)) == "--plugin glm47, or leave --plugin out"
    done = run("serve", "--plugin", "glm53", "--checkpoint", str(tmp_path))
    assert done.exit_code == 2
    assert "config.json describes glm47, not glm53" in done.stderr
