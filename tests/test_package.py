"""What is built: the wheel and the sdist hold what they should, and the wheel works where it is installed."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def test_wheel_works_where_it_is_installed(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        source = {path for path in (ROOT / "swapatch").rglob("*") if path.is_file() and path.suffix != ".pyc"}
        assert names == {str(path.relative_to(ROOT)) for path in source}
        archive.extractall(tmp_path)
    assert (tmp_path / "swapatch" / "py.typed").exists()
    code = "import swapatch; print(swapatch.__file__); swapatch.verify"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)


def test_sdist_has_all_that_the_tests_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/zoo.py", "scripts/test.sh"):
        assert wanted in names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "bench-results"))]
