#!/usr/bin/env bash
# Computes the reference values of tests/golden again, with PyTorch and transformers, from models/demo.
# They go to build/oracle/golden; then check_numpy.py compares the checkpoint with them. Meant for a
# machine with a GPU. The questions need source.json.xz: $ORACLE_SOURCE, or made here from packages.
set -euo pipefail
cd "$(dirname "$0")/../.."

tools=tools/demo-model
out=build/oracle
python=${PYTHON:-python3}
missing=()
for module in torch transformers tokenizers safetensors numpy; do
    "$python" -c "import $module" 2>/dev/null || missing+=("$module")
done
if [[ ${#missing[@]} != 0 ]]; then
    echo "oracle: $python has no ${missing[*]}. Needed: torch 2.11, transformers 5.17, tokenizers,"
    echo "oracle: safetensors, numpy, best on a machine with a GPU; set PYTHON=... to choose another."
    exit 1
fi
mkdir -p "$out"
source=${ORACLE_SOURCE:-$out/data/source.json.xz}
if [[ ! -f "$source" ]]; then
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || {
        echo "oracle: no $source, and no apt to make it from packages; see $tools/README.md"
        exit 1
    }
    echo "oracle: making $source from the packages of WordNet, the Bible and two dictionaries"
    mkdir -p "$out/deb"
    (cd "$out/deb" && apt-get download -qq wordnet-base bible-kjv bible-kjv-text dict-devil dict-elements)
    for deb in "$out"/deb/*.deb; do
        dpkg -x "$deb" "$out/root"
    done
    "$python" -B $tools/build_data.py "$out/root" "$out/data"
fi
"$python" -B $tools/fixtures.py models/demo "$source" "$out/golden"
"$python" -B $tools/check_numpy.py models/demo "$out/golden"
echo "oracle: values in $out/golden; compare with: diff -r tests/golden $out/golden"
