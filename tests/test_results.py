"""The README's numbers are those of the recorded runs."""
import importlib.util

import pytest


@pytest.fixture(scope="module")
def draw(repo):
    spec = importlib.util.spec_from_file_location("draw", repo / "figures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_table_is_the_recorded_runs(draw, repo):
    readme = (repo / "README.md").read_text()
    for algo, row in draw.table(draw.recorded()).iterrows():
        cells = [algo and f"`{algo}`", row["start (mean)"], *(row[f"seed {i}"] for i in range(4)), row["mean"],
                 row["95 % interval"], row["CPU s a run"]]
        assert "| " + " | ".join(cells) + " |" in readme


def test_every_recorded_run_says_where_it_comes_from(draw):
    for runs in draw.recorded().values():
        assert len(runs) >= 4
        for run in runs:
            provenance = run.config["provenance"]
            assert provenance["git"]["commit"] and not provenance["git"]["dirty"]
            assert provenance["machine"]["cores"] and provenance["versions"]["torch"]
