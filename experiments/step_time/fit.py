"""Fits the step-time model: python experiments/step_time/fit.py TABLE.csv writes the efficiencies and result.json.

TABLE.csv holds published steps in the columns that `runflat/perf/published.py` names.
"""

import json
import sys
from pathlib import Path

from runflat.perf.efficiency import efficiencies_to_json
from runflat.perf.fitting import PRIORS, Check, cross_validate, errors, fit
from runflat.perf.published import read_rows

HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "runflat" / "perf" / "efficiencies.json"
KINDS = ("seconds", "seconds_left_out", "constant_s", "constant_left_out_s")


def summary(checks: list[Check]) -> dict[str, dict[str, float]]:
    """Returns mean and largest error, in percent, of each kind of prediction."""
    found = {kind: errors(checks, kind) for kind in KINDS}
    return {
        kind: {"mean_percent": round(100 * e.mean, 2), "largest_percent": round(100 * e.largest, 2)}
        for kind, e in found.items()
    }


def main() -> None:
    """Fit, cross-validate, write both files."""
    rows = read_rows(Path(sys.argv[1]))
    efficiencies = fit(rows)
    TARGET.write_text(efficiencies_to_json(efficiencies), encoding="utf-8")
    checks = cross_validate(rows, efficiencies)
    publications = dict.fromkeys(row.publication for row in rows)
    result = {
        "efficiencies": json.loads(efficiencies_to_json(efficiencies)),
        "priors": {name: {"mean": mean, "spread": spread} for name, (mean, spread) in PRIORS.items()},
        "all": summary(checks),
        "by_publication": {p: summary([c for c in checks if c.row.publication == p]) for p in publications},
        "rows": [
            {
                "id": check.row.name,
                "published_s": check.row.seconds,
                **{kind: round(getattr(check, kind), 4) for kind in KINDS},
                "micro_batch": check.micro_batch,
                "chunks": check.virtual,
            }
            for check in checks
        ],
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["all"], indent=1))


if __name__ == "__main__":
    main()
