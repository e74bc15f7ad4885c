"""Names in cluster files that select figures: known, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.files.clusters import Host, parse_cluster
from autopart.files.presets import DEVICES
from autopart.ir.cluster import Cluster
from autopart.ir.errors import ClusterError


def read(path: Path, text: str) -> Cluster:
    """Parse a file with this text."""
    path.write_text(text)
    return parse_cluster(path, env={}, host=Host(memory_bytes=16 * 2**30, cores=8))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v100", "did you mean V100"),
        ("V100-32GB", "V100"),
        ("A100-40GB", "A100"),
        ("H1000", "H100"),
        ("NVIDIA H100", "H100"),
        ("RTX 4090", "data sheet are H200, H100, A100, V100, V100-16GB"),
        ("L4", "data sheet are H200"),
    ],
)
def test_a_device_name_without_data_sheet_is_refused_with_the_near_ones(tmp_path: Path, name: str, near: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read(tmp_path / "c.yaml", f"devices: [{{kind: cuda, name: {name}}}]")
    assert name in caught.value.what and near in caught.value.why
    assert "memory, flops, memory_bandwidth" in caught.value.fix
    figures = "memory: 24GB, flops: 8e13, memory_bandwidth: 1e12"
    (device,) = read(tmp_path / "c.yaml", f"devices: [{{kind: cuda, name: {name}, {figures}}}]").devices
    assert (device.name, device.memory_bytes, device.flops_per_s) == (name, 24 * 10**9, 8 * 10**13)


FIGURES = {"memory": "24GB", "flops": "{default: 8e13, bfloat16: 1e14}", "memory_bandwidth": "1e12"}


@settings(max_examples=300)
@given(
    st.sampled_from([*DEVICES, "RTX 4090", "epyc"]),
    st.sampled_from(("as it is", "lower", "longer", "shorter", "swapped", "spaced")),
    st.sampled_from(("cuda", "cpu")),
    st.sets(st.sampled_from(sorted(FIGURES))),
)
def test_a_name_never_selects_figures_that_are_not_its_own(
    tmp_path_factory: pytest.TempPathFactory, name: str, change: str, kind: str, given_figures: set[str]
) -> None:
    swapped = name[1] + name[0] + name[2:]
    changed = {"lower": name.lower(), "longer": name + "-40GB", "shorter": name[:-1], "swapped": swapped}
    name = (changed | {"spaced": f"{name} SXM"}).get(change, name)
    figures = "".join(f", {each}: {FIGURES[each]}" for each in sorted(given_figures))
    path = tmp_path_factory.mktemp("named") / "c.yaml"
    text = f"devices: [{{kind: {kind}, name: {name}{figures}}}]"
    sheet = DEVICES.get(name) if kind == "cuda" else None
    if sheet is None and given_figures != set(FIGURES):
        with pytest.raises(ClusterError, match="no data sheet"):
            read(path, text)
        return
    (device,) = read(path, text).devices
    own = (24 * 10**9, 10**14, 10**12)
    there = (device.memory_bytes, device.rate("bfloat16"), device.mem_bytes_per_s)
    known = (sheet.memory_bytes, sheet.rate("bfloat16"), sheet.mem_bytes_per_s) if sheet is not None else own
    stated = tuple(each in given_figures for each in ("memory", "flops", "memory_bandwidth"))
    assert there == tuple(mine if given else sheets for mine, sheets, given in zip(own, known, stated, strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "float8_e4m3", "float8", "fp32", "Float32", "float61", "half"])
def test_a_rate_for_what_is_no_dtype_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ClusterError, match=f"c.yaml: device 0 has a rate for '{dtype}', which is not a dtype"):
        read(tmp_path / "c.yaml", f"devices: [{{kind: cuda, flops: {{{dtype}: 1e14}}}}]")
