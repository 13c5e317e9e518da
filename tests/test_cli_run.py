"""`python -m onepass run` and ``ONEPASS_PATCH``: scripts run as by Python itself, with the libraries patched."""

import json
import os
import py_compile
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forks
import onepass
from onepass.cli.app import app
from onepass.cli.script import is_script
from onepass.integrations import patching
from onepass.integrations.switch import libraries_asked_for

pytestmark = forks.GROUP  # and that of `run`

SOURCE = Path(onepass.__file__).parents[1]
# What Python sets for a script, in one line.
SEEN = """
import pickle, sys
class Pickled: pass
main = sys.modules["__main__"]
pickle.loads(pickle.dumps(Pickled()))
print(__name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0], main.__dict__ is globals())
print(globals().get("__annotations__"))
"""
# Whether the libraries are imported, and whether they are patched.
STATE = """
import sys
for name, module, function in ("transformers", "transformers.loss.loss_utils", "ForCausalLMLoss"), (
    "trl", "trl.trainer.utils", "selective_log_softmax"
):
    found = getattr(sys.modules.get(module), function, None)
    patched = found is not None and found.__module__.startswith("onepass.")
    print(name, "patched" if patched else "imported" if name in sys.modules else "not imported")
"""


# A process that has imported torch, which takes seconds, and forks others that go on as `python -m onepass`.
FORKS = """
import gc, json, os, runpy, sys
import onepass.cli.script
gc.freeze()  # else each looks through all of torch when it ends
for line in sys.stdin:
    folder, arguments, files = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        for descriptor, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), descriptor)
        sys.argv, sys.path[0] = ["-m", *arguments], folder
        runpy._run_module_as_main("onepass")  # as Python does
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment(patch):
    found = {k: v for k, v in os.environ.items() if k not in ("ONEPASS_PATCH", "TRITON_INTERPRET")}
    return found | {"PYTHONPATH": str(SOURCE)} | ({} if patch is None else {"ONEPASS_PATCH": patch})


def python(*arguments, folder, patch=None):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment(patch), capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``onepass run`` without a patch, for which libraries are imported for seconds."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", FORKS], env=environment("0"), **pipes)
    files = [tmp_path_factory.mktemp("run") / name for name in ("stdout", "stderr")]

    def run(*arguments, folder):
        line = json.dumps([str(folder), ["run", *arguments], list(map(str, files))])
        print(line, file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *[file.read_text() for file in files])

    yield run
    process.stdin.close()
    process.wait()


@pytest.fixture
def write(tmp_path):
    def write(name, source):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write


ARGUMENTS = ["--help", "-m", "a b", "--", "run", "--out=x"]


@pytest.mark.parametrize(
    "path, flags", [("there/script.py", ()), ("link.py", ()), ("link.py", ("-P",)), ("far/../script.py", ())]
)
def test_a_script_sees_what_python_gives_it(tmp_path, write, run, path, flags):
    if flags and sys.version_info < (3, 11):
        pytest.skip("Python has no -P")
    write("there/script.py", SEEN)
    write("there/deep/other.py", "")
    (tmp_path / "link.py").symlink_to("there/script.py")
    (tmp_path / "far").symlink_to("there/deep")  # "far/.." is "there"
    theirs = python(*flags, path, *ARGUMENTS, folder=tmp_path)
    if flags:
        ours = python(*flags, "-m", "onepass", "run", path, *ARGUMENTS, folder=tmp_path, patch="0")
    else:
        ours = run(path, *ARGUMENTS, folder=tmp_path)
    assert ours.returncode == theirs.returncode == 0, ours.stderr
    assert ours.stdout == theirs.stdout


def test_a_module_a_package_and_a_folder_see_what_python_gives_them(tmp_path, write, run):
    write("module.py", SEEN)
    write("package/__init__.py", "")
    write("package/__main__.py", SEEN)
    for start in (["-m", "module"], ["-m", "package"], ["package"]):
        ours, theirs = (f(*start, *ARGUMENTS, folder=tmp_path) for f in (run, python))
        assert ours.returncode == theirs.returncode == 0, ours.stderr
        assert ours.stdout == theirs.stdout


def test_a_script_lives_until_the_end_of_the_process(tmp_path, write, run):
    source = """
    import atexit, multiprocessing, sys
    def late(): print("late", sys.modules["__main__"].late is late)
    def work(queue): queue.put(work.__module__)
    if __name__ == "__main__":
        atexit.register(late)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
    """
    write("script.py", source)
    ours, theirs = (f("script.py", folder=tmp_path) for f in (run, python))
    assert ours.stdout == theirs.stdout == "__mp_main__\nlate True\n", ours.stderr


@pytest.mark.parametrize("start, code, end", [(["script.py", "7"], 7, []), (["-m", "script", "0"], 1, ["stop"])])
def test_the_exit_code_is_that_of_the_script(tmp_path, write, start, code, end, run):
    write("script.py", "import sys\nprint('ran', flush=True)\nsys.exit(int(sys.argv[1]) or 'stop')\n")
    result = run(*start, folder=tmp_path)
    assert (result.returncode, result.stdout) == (code, "ran\n"), result.stderr
    assert result.stderr.splitlines() == ["onepass: nothing patched (ONEPASS_PATCH=0)", *end]


ERRORS = {
    "two exceptions": (
        "def fails():\n    return 1 / 0\n"
        "try:\n    fails()\nexcept ZeroDivisionError as error:\n    raise OSError(32, 'x') from error\n"
    ),
    "a syntax error": "x = = 1\n",
}


@pytest.mark.parametrize("source", ERRORS.values(), ids=list(ERRORS))
def test_a_traceback_begins_with_the_script(tmp_path, write, source, run):
    write("script.py", source)
    ours, theirs = (f("script.py", folder=tmp_path) for f in (run, python))
    assert ours.returncode == theirs.returncode == 1
    assert ours.stderr.partition("\n")[2] == theirs.stderr


def test_a_script_has_its_own_excepthook(tmp_path, write, run):
    write("script.py", "import sys\nsys.excepthook = lambda *_: print('hook')\nassert False\n")
    result = run("script.py", folder=tmp_path)
    assert (result.returncode, result.stdout) == (1, "hook\n")


def test_an_interrupted_script_ends_as_with_python(tmp_path, write, run):
    write("script.py", "raise KeyboardInterrupt\n")
    ours, theirs = (f("script.py", folder=tmp_path) for f in (run, python))
    assert ours.returncode == theirs.returncode != 0
    assert ours.stderr.endswith("KeyboardInterrupt\n")


def test_a_compiled_script(tmp_path, write, run):
    write("script.py", "import sys; print(__name__, sys.argv[1:])\n")
    py_compile.compile(str(tmp_path / "script.py"), str(tmp_path / "compiled.pyc"))
    ours, theirs = (f("compiled.pyc", "a", folder=tmp_path) for f in (run, python))
    assert ours.stdout == theirs.stdout == "__main__ ['a']\n"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that root cannot read either")
def test_a_script_that_cannot_be_read(tmp_path, run):
    refused = run("/proc/self/mem", folder=tmp_path)
    assert refused.returncode == 2 and "can't open file '/proc/self/mem': " in refused.stderr, refused.stderr


def test_errors_before_a_script_runs(tmp_path, run):
    missing = run("no.py", folder=tmp_path)
    assert missing.returncode == 2 and missing.stderr == "onepass: can't open file 'no.py': no such file or directory\n"
    missing = run("-m", "no_such_module", folder=tmp_path)
    assert missing.returncode == 1 and missing.stderr.endswith("No module named no_such_module\n")


def test_what_is_no_script_is_parsed_by_typer():
    assert is_script(["x.py", "--help"]) and is_script(["-m", "x", "--help"])
    for arguments, code in ([], 2), (["-m"], 2), (["--no-such-option", "x.py"], 2), (["--help"], 0):
        assert not is_script(arguments)
        result = CliRunner().invoke(app, ["run", *arguments])
        assert result.exit_code == code, result.output
    assert "SCRIPT" in result.output and "-m" in result.output


def test_run_needs_no_extra(tmp_path, write):
    source = """
    import sys
    sys.modules |= dict.fromkeys(["typer", "rich", "click", "matplotlib"])  # they cannot be imported
    sys.argv = ["onepass", "run", "script.py"]
    from onepass.cli import main
    main()
    """
    write("script.py", "print('ran')\n")
    result = forks.run(textwrap.dedent(source), folder=tmp_path, environment=environment("0"))
    assert result.stdout == "ran\n", result.stderr


def test_run_patches_before_the_script(tmp_path, write):
    pytest.importorskip("transformers")
    pytest.importorskip("trl")
    write("script.py", STATE)
    code = "import runpy; runpy._run_module_as_main('onepass')"  # as `python -m` does
    result = forks.run(code, "run", "script.py", folder=tmp_path, environment=environment(None))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "transformers patched\ntrl patched\n"
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("onepass: ")]
    assert line.startswith("onepass: patched transformers ") and "trl" in line and "names replaced" in line


def test_the_variable_patches_on_import(tmp_path):
    pytest.importorskip("transformers")
    result = forks.run("import onepass\n" + STATE, folder=tmp_path, environment=environment("transformers"))
    assert result.stdout == "transformers patched\ntrl not imported\n", result.stderr


VALUES = {"": None, "0": (), "1": ["transformers"], "transformers": ["transformers"]}


@pytest.mark.parametrize("value", VALUES)
def test_the_values_of_the_variable(monkeypatch, value):
    monkeypatch.setenv("ONEPASS_PATCH", value)
    installed = {"transformers": "a spec"}
    monkeypatch.setattr("onepass.integrations.patching.find_spec", installed.get)
    assert libraries_asked_for() == VALUES[value]


NAMES = ", ".join(map(repr, patching.NAMES))
EXPECTED = f"ONEPASS_PATCH: expected 0, 1, or any of {NAMES} separated by commas, got "


@pytest.mark.parametrize("value", ["yes", "transformers,", "1,trl", "Transformers"])
def test_a_wrong_value_is_an_error_that_names_the_variable(monkeypatch, value):
    monkeypatch.setenv("ONEPASS_PATCH", value)
    with pytest.raises(ValueError, match=f"^{EXPECTED}{value!r}$"):
        libraries_asked_for()


def test_a_wrong_value_is_an_error_of_the_import(tmp_path):
    result = forks.run("import onepass", folder=tmp_path, environment=environment("yes"))
    assert result.returncode == 1 and "During handling" not in result.stderr
    assert result.stderr.splitlines()[-1] == f"ValueError: {EXPECTED}'yes'"


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("ONEPASS_PATCH", "trl")
    monkeypatch.setattr("onepass.integrations.patching.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"^ONEPASS_PATCH: trl is not installed; pip install 'onepass\[trl\]'$"
    ):
        libraries_asked_for()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_torchrun_starts_it_in_every_process(tmp_path, write, processes):
    write("script.py", "import os, sys\nprint(os.environ['RANK'], sys.argv, __name__, flush=True)\n")
    start = ["--nproc-per-node", processes, "-m", "onepass", "run", "script.py", "--x"]
    code = "import runpy; runpy._run_module_as_main('torch.distributed.run')"  # as `python -m` does
    result = forks.run(code, *start, folder=tmp_path, environment=environment("0"))
    expected = [f"{n} ['script.py', '--x'] __main__" for n in range(processes)]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr
