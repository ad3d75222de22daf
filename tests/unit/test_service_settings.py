"""Settings: three sources, their order, and what is refused."""

from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from glmserve.service.settings import ServiceSettings, SettingsError


class Settings(ServiceSettings):
    """A service."""

    model_config = SettingsConfigDict(env_prefix="GLM_TEST_")

    listen: str = Field("127.0.0.1:0", description="Address.")
    max_running: int = Field(3, ge=1, le=5, description="Count.")


def load(*argv: str) -> Settings:
    return Settings.load(argv, prog="test")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "test.toml"
    path.write_text("max_running = 2\n")
    return path


def test_file_then_environment_then_flag(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().max_running == 3
    assert load("--config", str(config)).max_running == 2
    monkeypatch.setenv("GLM_TEST_MAX_RUNNING", "4")
    assert load("--config", str(config)).max_running == 4
    assert load("--config", str(config), "--max-running", "5").max_running == 5


def test_the_file_may_be_named_by_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_TEST_CONFIG", str(config))
    assert load().max_running == 2


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().listen = "elsewhere"  # type: ignore[misc]


def test_unknown_flag_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load("--max-runing", "4")
    assert stopped.value.code == 2
    assert "--max-runing" in capsys.readouterr().err


def test_unknown_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_TEST_MAX_RUNING", "4")
    with pytest.raises(SettingsError, match="GLM_TEST_MAX_RUNING.*known:.*GLM_TEST_MAX_RUNNING"):
        load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_runing = 2", "unknown key 'max_runing'"),
        ("max_running = ", "cannot read settings file"),
        ("max_running = 6", "max_running: .*less than or equal to 5.*given: 6"),
        ("max_running = 'many'", "max_running: .*valid integer"),
    ],
)
def test_bad_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load("--config", str(path))


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml"):
        load("--config", str(tmp_path / "none.toml"))
