import json
from pathlib import Path

import pytest

from runflat.cluster.ledger import Incident, append_json_line
from runflat.errors import ConfigError, TraceError
from runflat.plan.batch import BatchRule
from runflat.sim.advise import advice_text, advise
from runflat.sim.config import RecoveryConfig
from runflat.sim.measured import measured_recovery, read_incidents
from runflat.sim.presets import preset
from runflat.sim.spares import spare_domains_for
from runflat.sim.static import spares_needed


def test_costs_are_the_medians_of_measured_phases(tmp_path: Path) -> None:
    """Catches phases that are averaged over incidents which did not have them, or counted twice."""
    path = tmp_path / "events.jsonl"
    phases = [
        {"detect": 0.1, "abort": 0.02, "barrier": 0.03, "form": 0.1, "digest": 0.05, "transfer": 0.3},
        {"detect": 0.3, "abort": 0.02, "form": 0.2},
        {"detect": 0.2, "form": 0.3, "transfer": 0.5},
        {"start": 9.0, "replay": 9.0},
    ]
    for number, seconds in enumerate(phases):
        incident = Incident(number=number, device="0:0", cause="kill", started_s=1.0, strategy="ntp", phases_s=seconds)
        append_json_line(path, incident.to_json())
    append_json_line(
        path, {"record": "change", "joined": ["0:0"], "stages_s": {"copy": 4.0, "warm": 0.5}, "stopped_s": 0.25}
    )
    append_json_line(path, {"record": "change", "joined": [], "stages_s": {}, "stopped_s": 9.0})
    append_json_line(path, {"event": "kill", "device": "0:0", "time_s": 1.0})
    costs = measured_recovery(read_incidents([path]), RecoveryConfig(restart_s=77))
    assert costs.detect_s == pytest.approx(0.2)
    assert costs.reform_s == pytest.approx(0.22)
    assert costs.transfer_s == pytest.approx(0.4)
    assert (costs.join_s, costs.warm_up_s, costs.restart_s) == (0.25, 4.5, 77)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"record": "incident"}', "row 1: needs 'phases_s'"),
        ("{", "row 1: not JSON"),
        (json.dumps({"record": "incident", "phases_s": {"lunch": 1}}), "unknown phase 'lunch'"),
    ],
)
def test_bad_incidents_are_named(tmp_path: Path, text: str, words: str) -> None:
    """Catches measured costs that silently leave an incident or a phase out."""
    path = tmp_path / "events.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(TraceError, match=words):
        measured_recovery(read_incidents([path]), RecoveryConfig())
    with pytest.raises(TraceError, match="cannot read"):
        read_incidents([tmp_path / "absent"])


def test_spares_of_the_published_cluster() -> None:
    """Catches capped jobs that pause too early or too late: 90, 16 and 0 spare domains with 90 domains hit."""
    config = preset("ntp-paper")
    assert [spares_needed(config, chain, 90) for chain in ("drop", "ntp", "ntp+boost")] == [90, 16, 0]
    assert spares_needed(config, "drop", 0) == 0


def test_spares_for_a_probability() -> None:
    """Catches a search that returns a number with which the job still pauses, or one more than needed."""
    config = preset("lab").model_copy(update={"seeds": 12, "days": 60.0})
    need = spare_domains_for(config, "drop", 0.9)
    assert need.without_pause >= 0.9
    assert need.spare_domains >= 1
    assert spare_domains_for(config, "drop", 0.1).spare_domains <= need.spare_domains
    with pytest.raises(ConfigError, match="probability"):
        spare_domains_for(config, "drop", 1.5)


def test_advice_for_a_fixed_batch_names_the_spares() -> None:
    """Catches advice that is silent about pauses where the batch is fixed."""
    config = preset("lab").model_copy(update={"seeds": 4, "days": 60.0, "rule": BatchRule.CAPPED})
    text = advice_text(config, advise(config))
    assert "Fixed batch:" in text
    assert "without a pause" in text
