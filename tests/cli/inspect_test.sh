# switchyard inspect: the published figures of DeepSeek-V3 from its config.json alone, layouts, usage.
. tests/cli/common.sh

# expect RC TEXT ARGUMENT..: the exit code, and a text on standard output or error
expect()
{
    local want=$1 text=$2 got
    shift 2
    "$SWITCHYARD" inspect "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "inspect $*: want exit code $want, got $got: $(cat "$dir/err")"
    grep -qF -- "$text" "$dir/out" "$dir/err" ||
        fail "inspect $*: want '$text', got: $(cat "$dir/out" "$dir/err")"
    [ "$want" -ne 1 ] || [ "$(wc -l <"$dir/err")" -eq 1 ] ||
        fail "inspect $*: want one line, got: $(cat "$dir/err")"
}

v3=$dir/v3
mkdir "$v3"
cp tests/fuzz/corpus/config/deepseek_v3 "$v3/config.json"

expect 0 'parameters     671.03 B' "$v3"
expect 0 'active       36.63 B a token' "$v3"
expect 0 'KV cache       70,272 bytes a token, 40,016 with --kv-dtype fp8' "$v3"
for row in '8 100.84' '16 59.96' '32 39.52' '64 29.30' '128 24.19'; do
    set -- $row
    expect 0 "$2 GB on every rank" "$v3" --ep "$1"
done
expect 0 '92.08 GB on every rank' "$v3" --ep 8 --tp 4
expect 0 'EP 128 = DP 32 x TP 4' "$v3" --dp 32 --tp 4
expect 0 '15.43 GB on every rank' "$v3" --dp 32 --tp 4
expect 0 '126 more, --all-ranks shows them' "$v3" --ep 128
expect 0 '254-255' "$v3" --ep 128
expect 0 '   77        19         1      154-155' "$v3" --ep 128 --tp 4 --all-ranks
expect 0 '{"params":671026419200,"params_active":36625618432,"params_mtp":13463426304,"kv_bytes_per_token":70272,"weight_bytes_per_rank":39521833312,"ep":32,"dp":32,"tp":1,"ranks":[{"rank":0,"dp_group":0,"tp_slice":0,"first_expert":0,"n_experts":8,"weight_bytes":39521833312,' \
    "$v3" --ep 32 --json
expect 0 '{"rank":31,"dp_group":31,"tp_slice":0,"first_expert":248,' "$v3" --ep 32 --json
expect 0 'a rank has   70,272 bytes of KV cache a token of its DP group' "$v3" --ep 128 --tp 4
expect 0 'exact only   layout EP 4, DP 1, TP 4: TP 4 cuts the attention outputs' models/demo --tp 4

expect 0 '"weight_bytes_per_rank":' models/demo --json
expect 0 'MTP          4.69 M more' models/demo
expect 0 'MB to ' models/demo --tp 4

# The other families, from their published config.json.
for family in deepseek_v2_lite kimi_k2 mixtral_8x7b; do
    mkdir "$dir/$family"
    cp "tests/fuzz/corpus/config/$family" "$dir/$family/config.json"
done
expect 0 '{"params":15706484224,"params_active":2451435008,"params_mtp":0,"kv_bytes_per_token":31104,"weight_bytes_per_rank":31412968448,' \
    "$dir/deepseek_v2_lite" --json
expect 0 'router       6 of 64 experts a token, softmax scores, times 1' "$dir/deepseek_v2_lite"
expect 0 '"params":1026408232448,"params_active":31687095808,' "$dir/kimi_k2" --json
expect 0 'router       8 of 384 experts a token, sigmoid scores + bias, normalised, times 2.827' "$dir/kimi_k2"
expect 0 '{"params":46702792704,"params_active":12748853248,"params_mtp":0,"kv_bytes_per_token":131072,"weight_bytes_per_rank":93405585408,' \
    "$dir/mixtral_8x7b" --json
expect 0 'attention    GQA, 32 heads, 8 of keys and values, head 128' "$dir/mixtral_8x7b"
expect 0 'router       2 of 8 experts a token, softmax scores, normalised, times 1' "$dir/mixtral_8x7b"
expect 0 'EP 8 = DP 1 x TP 8' "$dir/mixtral_8x7b" --ep 8 --tp 8
expect 0 'a rank has   16,384 bytes of KV cache a token' "$dir/mixtral_8x7b" --ep 8 --tp 8
sed 's/"num_key_value_heads": 8/"num_key_value_heads": 4/' tests/fuzz/corpus/config/mixtral_8x7b >"$dir/mixtral_8x7b/config.json"
expect 1 '4 kv heads do not divide by TP 8; nearest: EP 8, DP 2, TP 4' "$dir/mixtral_8x7b" --tp 8 --ep 8

expect 1 'layout EP 12, DP 12, TP 1: 256 experts do not divide by EP 12; nearest: EP 8, DP 8, TP 1' \
    "$v3" --ep 12
expect 1 "switchyard inspect: $dir/none: no such model directory" "$dir/none"
expect 1 "switchyard inspect: $v3/config.json: want a model directory, found a file" "$v3/config.json"
sed 's/"hidden_size": 7168, //' "$v3/config.json" >"$dir/config.json"
expect 1 'config.json: hidden_size: missing' "$dir"
sed 's/"hidden_size"/"hidden_sizes": 1, "hidden_size"/' "$v3/config.json" >"$dir/config.json"
expect 0 "switchyard: config.json: unknown key 'hidden_sizes' ignored" "$dir"

expect 2 'want a MODEL directory'
expect 2 "want one MODEL, got 'a' and 'b'" a b
expect 2 "--ep: want a whole number from 1 to 1048576, got '0'" "$v3" --ep 0
expect 2 'unrecognized option' "$v3" --epp 1
expect 0 'switchyard inspect DeepSeek-V3 --ep 128 --tp 4' --help

if [ -w /dev/full ]; then
    "$SWITCHYARD" inspect models/demo >/dev/full 2>"$dir/err"
    [ $? -eq 1 ] || fail "a full standard output: want exit code 1"
    grep -q '^switchyard inspect: cannot write to standard output' "$dir/err" ||
        fail "a full standard output: $(cat "$dir/err")"
fi

[ "$n_failed" -eq 0 ] || exit 1
echo "inspect: ok"
