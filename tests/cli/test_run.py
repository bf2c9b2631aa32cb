"""``mt-megatron run``: what python would do, and a backend where the scope says cuda."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.cli.main import main
from tests.launch import ROOT

Done = subprocess.CompletedProcess[str]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def python(*words: str, cwd: Path, path: str = str(ROOT), **variables: str) -> Done:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MT_MEGATRON_BACKEND"):
        environment.pop(name, None)
    for name in ("MASTER_ADDR", "MASTER_PORT", "CUDA_DEVICE_MAX_CONNECTIONS"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=400
    )


def run(*words: str, cwd: Path, options: tuple[str, ...] = (), **more: str) -> Done:
    command = ("-m", "mt_megatron.cli", "run", "--backend", "cpu", *options, "--", *words)
    return python(*command, cwd=cwd, **more)


def report(done: Done) -> Any:
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "cpu"], "nothing says what to run"),
        (["--backend", "cpu", "--", "absent.py"], "no script 'absent.py'"),
        (["--backend", "cpu", "--", "-m", "absent_module.x"], "no module 'absent_module'"),
        (["--backend", "cpu", "--", "."], "without a __main__.py"),
        (["--backend", "cpv", "--", "there.py"], "did you mean 'cpu'"),
        (["--backend", "cpu", "--redirect", "absent", "--", "there.py"], "--redirect absent: no such folder"),
        (["--backend", "cpu", "--scope", "absent", "--", "there.py"], "is now called --redirect FOLDER"),
    ],
)
def test_wrong_use_is_said_before_anything_starts(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path, there="")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["run", *words]) == 2
    assert message in capsys.readouterr().err


def test_another_megatron_beside_the_script_is_refused(tmp_path: Path) -> None:
    write(tmp_path, script="print('ran')", megatron__in__core__in____init__="")
    write(
        tmp_path / "megatron" / "core",
        package_info="MAJOR = 0\nMINOR = 8\nPATCH = 0\nPRE_RELEASE = ''\n",
    )
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "megatron-core is 0.8.0" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('some words')", 1),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("def f(): raise ValueError('x')\nf()", 1),
        ("import broken", 1),
        ("try:\n    import broken\nexcept ImportError as error:\n    raise RuntimeError('later')", 1),
    ],
)
def test_ends_as_python_ends_it(tmp_path: Path, body: str, code: int) -> None:
    """Exit codes, signals and tracebacks to the letter; an import shows no frame of ours."""
    write(tmp_path, script=body, broken="import absent_for_sure\n")
    plain, ours = python("script.py", cwd=tmp_path), run("script.py", cwd=tmp_path)
    assert plain.returncode == ours.returncode == code
    assert ours.stderr == plain.stderr


def test_the_script_finds_itself_as_python_would_have_it(tmp_path: Path) -> None:
    body = """
        import json, sys
        import beside
        print(json.dumps([__name__, __file__, sys.argv, sys.path, __spec__ is None, beside.__file__,
                          sys.modules["__main__"].__dict__ is globals(), sys.flags.optimize]))
    """
    write(tmp_path / "below", script=body, beside="")
    words = ("below/script.py", "--backend", "x", "--", "-y")
    plain = report(python(*words, cwd=tmp_path))
    # The folder that carries us into the process is gone from its path.
    assert report(run(*words, cwd=tmp_path)) == plain
    module = ("-m", "below.script", "z")
    assert run(*module, cwd=tmp_path).stderr == python(*module, cwd=tmp_path).stderr != ""


SCOPE = """
    import json, os, subprocess, sys, types
    import torch
    from torch import zeros
    from torch.cuda import device_count as count
    import inside, installed, standard
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import new_group

    def local():
        import torch
        from torch import cuda
        from torch.cuda import is_available
        from torch.distributed.distributed_c10d import new_group
        return [torch.cuda.is_available(), cuda.is_available(), is_available(), new_group is dist.new_group]

    def methods():
        tensor = torch.ones(2, device="cuda")
        model = torch.nn.Linear(2, 2).to("cuda:0").to_empty(device="cuda")
        made = [tensor.cuda(), tensor.to("cuda"), tensor.new_zeros(2, device="cuda"), zeros(1, device="cuda"),
                tensor.type("torch.cuda.HalfTensor"), model.weight, tensor.type(torch.cuda.DoubleTensor)]
        torch.save(tensor, "saved.pt")
        made.append(torch.load("saved.pt", map_location=lambda storage, place: storage.cuda()))
        made.append(torch.load("saved.pt", map_location="cuda:0"))
        return [one.type() for one in made], [one.is_cuda for one in made], [str(one.device) for one in made]

    def main():
        found = {"local": local(), "methods": methods(), "inside": inside.answers(), "count": count(),
                 "installed": installed.answers(), "standard": standard.answers(),
                 "group": new_group is dist.new_group, "truth": sys.modules["torch"].cuda.is_available(),
                 "chained": "CHAINED" in os.environ, "site": sys.modules["sitecustomize"].__file__}
        for method in ("spawn", "forkserver"):
            with torch.multiprocessing.get_context(method).Pool(1) as pool:
                found[method] = pool.apply(inside.answers)
        command = [sys.executable, "-c", "import json, sys, torch; sys.path.insert(0, 'app'); import inside; "
                   "print(json.dumps([torch.cuda.is_available(), inside.answers()]))"]
        found["subprocess"] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        alone = {k: v for k, v in os.environ.items() if not k.startswith("MT_MEGATRON")}
        found["not asked"] = json.loads(subprocess.run(command, capture_output=True, env=alone).stdout)
        print(json.dumps(found))

    if __name__ == "__main__":
        main()
"""
ANSWERS = """
    import torch
    def answers():
        from torch.cuda import is_available
        return [torch.cuda.is_available(), is_available(), torch.ones(1).is_cuda, torch.ones(1).type()]
"""
REDIRECTED = [True, True, True, "torch.cuda.FloatTensor"]
TRUTH = [False, False, False, "torch.FloatTensor"]


def test_the_scope_sees_the_backend_and_nobody_else_does(tmp_path: Path) -> None:
    """In functions, in children, beside a virtual environment; a sitecustomize of the user's runs too."""
    write(tmp_path / "app", script=SCOPE, inside=ANSWERS)
    write(tmp_path / "app" / "venv" / "site-packages", installed=ANSWERS)
    write(tmp_path / "elsewhere", standard=ANSWERS, sitecustomize="import os; os.environ['CHAINED'] = '1'")
    path = os.pathsep.join(
        [str(ROOT), str(tmp_path / "elsewhere"), str(tmp_path / "app" / "venv" / "site-packages")]
    )
    found = report(run("app/script.py", cwd=tmp_path, path=path))
    assert found["local"] == [True, True, True, True] and found["group"] is True and found["count"] == 1
    kinds, cuda, devices = found["methods"]
    assert kinds[4] == "torch.cuda.HalfTensor" and kinds[6] == "torch.cuda.DoubleTensor"
    assert {kinds[i] for i in (0, 1, 2, 3, 5, 7, 8)} == {"torch.cuda.FloatTensor"}
    assert all(cuda) and set(devices) == {"cpu"}
    assert found["inside"] == found["spawn"] == found["forkserver"] == REDIRECTED
    assert found["installed"] == found["standard"] == TRUTH and found["truth"] is False
    assert found["subprocess"] == [False, REDIRECTED]
    assert found["not asked"] == [False, TRUTH]
    assert found["chained"] and "elsewhere" in found["site"]


def test_a_test_suite_through_pytest(tmp_path: Path) -> None:
    """conftest and test modules, which pytest compiles itself, and a negative control outside."""
    write(
        tmp_path / "suite",
        conftest="import pytest, torch\n@pytest.fixture\ndef there(): return torch.cuda.is_available()",
        test_it="""
            import sys, torch
            def test_device(there):
                import torch as again
                assert there and again.cuda.is_available() and torch.zeros(2, device="cuda").is_cuda
            def test_truth():
                assert not sys.modules["torch"].cuda.is_available()
        """,
    )
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "suite")
    done = run(*words, cwd=tmp_path, options=("--redirect", "suite"))
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert "--scope" not in done.stderr
    former = run(*words, cwd=tmp_path, options=("--scope", "suite"))
    assert former.returncode == 0 and "2 passed" in former.stdout, former.stdout + former.stderr
    assert former.stderr.count("--scope FOLDER is now called --redirect FOLDER") == 1
    outside = run(*words, cwd=tmp_path)
    assert outside.returncode == 1 and "1 failed" in outside.stdout
    assert "pytest is installed, so it is not redirected itself" in outside.stderr


def test_torch_may_be_there_before_us(tmp_path: Path) -> None:
    write(tmp_path, script="import json, torch\nprint(json.dumps(torch.cuda.is_available()))")
    write(tmp_path / "early", sitecustomize="import torch")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "early")])
    assert report(run("script.py", cwd=tmp_path, path=path)) is True


def test_a_backend_that_cannot_be_used_ends_the_process(tmp_path: Path) -> None:
    write(tmp_path, script="import torch\nprint('ran')")
    done = python("-m", "mt_megatron.cli", "run", "--backend", "cuda", "--", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "BackendError" in done.stderr and "Traceback" not in done.stderr


PRETRAIN = """
    # What Megatron-LM's pretrain_gpt.py does first: it imports Megatron, reads the environment, meets.
    import os
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    assert int(os.getenv("RANK", "0")) == 0 and int(os.getenv("WORLD_SIZE", "1")) == 1
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        raise RuntimeError("requires CUDA_DEVICE_MAX_CONNECTIONS to 1")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    torch.distributed.all_reduce(torch.ones(1, device="cuda"))
    print("met")
    import megatron.training
"""


def test_a_script_without_torchrun_is_a_run_of_one(tmp_path: Path) -> None:
    """The rendezvous works, upstream's deprecations are not shown, and no frame of ours is in a traceback."""
    broken = {"megatron__in__training__in____init__": "class Tokenizer:\n    raise KeyError('mine')"}
    write(tmp_path, pretrain=PRETRAIN, **broken)
    done = run("pretrain.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "met\n"), done.stderr[-3000:]
    assert "KeyError: 'mine'" in done.stderr and "FutureWarning" not in done.stderr
    assert "hooks.py" not in done.stderr and "<frozen" not in done.stderr
