"""find(): the same answer as a plain search over everything, whatever index it takes."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.library_fixture import FLAGS, MEMORY, SPEEDS, blueprint_id, fill
from esper_ir.diagnostics import EsperError
from library import contracts
from library.contracts import KernelQuery, decode, json_schema
from library.store import Library
from tests.library.helpers import make_container, validated
from tests.pace import slowness

TAGS = st.sampled_from([*SPEEDS, *MEMORY, *FLAGS])
SOME = st.lists(TAGS, max_size=2, unique=True).map(tuple)
QUERIES = st.builds(
    KernelQuery,
    blueprint_id=st.none() | st.integers(0, 30).map(blueprint_id),
    required_tags=SOME,
    preferred_tags=SOME,
    excluded_tags=SOME,
    max_latency_ms=st.none() | st.floats(0.01, 3),
    max_memory_mb=st.none() | st.floats(0.5, 1000),
    max_risk=st.none() | st.floats(0, 1),
    target_gpu_arch=st.none() | st.sampled_from(["sm_90", "a100", "x86-64-v3", "gfx942"]),
    limit=st.integers(1, 40),
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("query")
    with Library.open(root / "library", trust=root / "keys") as lib:
        fill(lib, 3000, 500)
        yield lib


def plainly(lib: Library, query: KernelQuery) -> list[tuple[Any, ...]]:
    """Every fact, filtered and sorted in Python: (-preferred, latency, risk) of the best."""
    text = """SELECT a.id, a.blueprint, a.arch, a.target, t.tags, f.latency_ms, f.memory_mb, f.risk
        FROM facts f JOIN artifacts a ON a.num = f.artifact JOIN tagsets t ON t.num = f.tagset"""
    found = []
    for _, of, arch, target, joined, latency, memory, risk in lib.index.rows(text):
        tags = set(joined.split())
        if query.blueprint_id not in (None, of) or query.target_gpu_arch not in (None, arch, target):
            continue
        if not tags.issuperset(query.required_tags) or tags & set(query.excluded_tags):
            continue
        bounds = ((latency, query.max_latency_ms), (memory, query.max_memory_mb), (risk, query.max_risk))
        if any(bound is not None and (value is None or value > bound) for value, bound in bounds):
            continue
        found.append((-len(tags & set(query.preferred_tags)), latency, risk))
    return sorted(found)[: query.limit]


@given(query=QUERIES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_find_is_what_a_plain_search_finds(filled: Library, query: KernelQuery) -> None:
    if set(query.required_tags) & set(query.excluded_tags):
        with pytest.raises(EsperError):
            filled.find(query)
        return
    found = [(-m.preferred_matched, m.latency_ms, m.risk) for m in filled.find(query).matches]
    assert found == plainly(filled, query)


def test_every_refusal_has_its_reason(filled: Library) -> None:
    query = KernelQuery(
        blueprint_id=blueprint_id(3), required_tags=("high_speed",), max_risk=0.5, target_gpu_arch="sm_90"
    )
    result = filled.find(query, explain=True)
    everything = filled.artifacts(blueprint=blueprint_id(3))
    assert len(result.matches) + len(result.refused) == len(everything) == 6
    assert sum(result.reasons.values()) == len(result.refused)
    known = ("architecture", "tag missing", "risk too high", "PENDING_BENCHMARKING", "ranked below")
    assert all(r.reason.startswith(known) for r in result.refused), result.refused


def test_unmeasured_ranks_last_and_never_meets_a_bound(lib: Library) -> None:
    measured = validated(lib, 1, {"wep": {"latency_ms_p99": 5.0}, "risk_score": 0.1})
    unknown = validated(lib, 2, {"wep": {}})
    assert [m.artifact_id for m in lib.find(KernelQuery()).matches] == [measured, unknown]
    assert [m.artifact_id for m in lib.find(KernelQuery(max_latency_ms=9)).matches] == [measured]
    reasons = lib.find(KernelQuery(max_latency_ms=9), explain=True).refused
    assert [(r.artifact_id, r.reason) for r in reasons] == [(unknown, "latency_ms not measured")]


def test_latency_at_a_shape(lib: Library) -> None:
    shapes = {"8192x4096": {"latency_ms_p99": 0.1}, "128x128": {"latency_ms_p99": 0.02}}
    one = validated(lib, 1, {"wep": {"latency_ms_p99": 9.0, "shapes": shapes}})
    two = validated(
        lib, 2, {"wep": {"latency_ms_p99": 1.0, "shapes": {"8192x4096": {"latency_ms_p99": 0.2}}}}
    )
    found = lib.find(KernelQuery(shape="8192x4096", max_latency_ms=0.5)).matches
    assert [(m.artifact_id, m.latency_ms) for m in found] == [(one, 0.1), (two, 0.2)]
    small = lib.find(KernelQuery(shape="128x128"), explain=True)
    assert [m.artifact_id for m in small.matches] == [one]
    assert small.refused[0].reason == "shape not measured: 128x128"


def test_annotations_change_the_ranking(lib: Library) -> None:
    one, two = (validated(lib, n, {"wep": {"latency_ms_p99": 1.0}, "risk_score": 0.5}) for n in (1, 2))
    assert lib.annotate(two, {"risk_score": 0.1, "generated_tags": ["trainable"]}) == 1
    assert [m.artifact_id for m in lib.find(KernelQuery()).matches] == [two, one]
    assert lib.annotate(two, {"risk_score": 0.9}) == 2
    assert [m.artifact_id for m in lib.find(KernelQuery()).matches] == [one, two]
    with pytest.raises(EsperError):
        lib.annotate(two, {"verdict": "VALIDATED"})


@pytest.mark.parametrize(
    "query",
    [
        KernelQuery(limit=0),
        KernelQuery(limit=10**9),
        KernelQuery(max_risk=math.nan),
        KernelQuery(max_latency_ms=-1.0),
        KernelQuery(required_tags=("a",), excluded_tags=("a",)),
    ],
)
def test_senseless_queries(lib: Library, query: KernelQuery) -> None:
    with pytest.raises(EsperError) as error:
        lib.find(query)
    assert error.value.code == "E0720"


@pytest.mark.parametrize("name", ["required_tags", "preferred_tags", "excluded_tags"])
def test_a_misspelt_tag_is_refused_with_the_nearest(lib: Library, name: str) -> None:
    assert not lib.find(KernelQuery(**{name: ("high_speed",)})).matches, "known, though nothing has it"
    with pytest.raises(EsperError) as error:
        lib.find(KernelQuery(**{name: ("high_sped",)}))
    refused = error.value
    assert (refused.code, refused.node) == ("E0720", name) and "did you mean high_speed" in str(refused.hint)
    validated(lib, 1, {"generated_tags": ["of_ours"]})
    lib.find(KernelQuery(**{name: ("of_ours",)}))
    with pytest.raises(EsperError, match="of_outs"):
        lib.find(KernelQuery(blueprint_id="ab", **{name: ("of_outs",)}))


def test_contract_records_decode_strictly() -> None:
    query = {"required_tags": ["a"], "max_risk": 1, "limit": 3}
    assert decode(KernelQuery, query) == KernelQuery(required_tags=("a",), max_risk=1.0, limit=3)
    for wrong in (
        {"tags": []},
        {"limit": "3"},
        {"limit": True},
        {"required_tags": "a"},
        [],
        {"max_risk": "x"},
    ):
        with pytest.raises(EsperError) as error:
            decode(KernelQuery, wrong)
        assert error.value.code == "E0720"
    with pytest.raises(EsperError):
        decode(contracts.FieldReport, {"blueprint_id": "x"})
    schema = json_schema(contracts.UrabraskValidationReport)
    assert schema["properties"]["generated_tags"] == {"type": "array", "items": {"type": "string"}}
    assert "passed_validation" in schema["required"] and "conf_level" not in schema["required"]


def test_a_query_looks_at_few_rows(filled: Library) -> None:
    """No scan over everything for a plain query: a generous bound, the figures are in bench/."""
    began = time.process_time()
    for _ in range(20):
        filled.find(KernelQuery(required_tags=("high_speed",), target_gpu_arch="sm_90"))
    assert (time.process_time() - began) / 20 < 0.05 * slowness()


def test_an_artifact_as_a_contract_record(lib: Library) -> None:
    record = lib.put_artifact(make_container(1), provenance={"compilation_seconds": 2.5})
    found = lib.contract(record.id)
    assert found.kernel_binary_ref == f"sha256:{record.digest}" and found.validation_report is None
    assert found.compilation_metadata["compilation_seconds"] == 2.5
    lib.record_verdict(record.id, {"policy": "p"}, passed=True)
    found = lib.contract(record.id)
    assert found.status == "VALIDATED" and found.validation_report == {"policy": "p"}
    assert decode(contracts.CompiledKernelArtifact, found.__dict__) == found
