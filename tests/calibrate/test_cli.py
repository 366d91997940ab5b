import pytest

from calibrate.cli import COMMANDS, main


def test_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: base-moe {command}" in capsys.readouterr().out


def test_unknown_command(capsys):
    assert main(["decode"]) == 2
    assert "unknown command 'decode'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect", "/nowhere.safetensors"], "/nowhere.safetensors"),
        (["demo", "--prompts", "0"], "at least 1"),
        (["demo", "--budgets", "4,many"], "not understood"),
        (["demo", "--budgets", "65"], r"1..64"),
    ],
)
def test_bad_input_is_one_line_and_status_2(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"base-moe {argv[0]}: ") and message in error


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("base-moe 0.")
