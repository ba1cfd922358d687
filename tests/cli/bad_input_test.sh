# Broken checkpoints: one line that names file and tensor or field, exit code 1, no crash.
. tests/cli/common.sh
shard=model-00001-of-000001.safetensors
index=model.safetensors.index.json

"$SWITCHYARD" synth --config models/demo/config.json --layers 2 --seed 1 --out "$dir/good" || exit 1

# spoil: a fresh copy in $dir/bad
spoil()
{
    rm -rf "$dir/bad"
    cp -r "$dir/good" "$dir/bad"
}

# refused TEXT: loading $dir/bad fails with one line that has TEXT
refused()
{
    local got
    "$SWITCHYARD" generate "$dir/bad" --ids 0,1 --max-tokens 1 >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    if [ "$got" -ne 1 ] || [ "$(wc -l <"$dir/err")" -ne 1 ] || ! grep -qF -- "$1" "$dir/err"; then
        echo "FAIL: want exit code 1 and '$1', got $got: $(cat "$dir/err")" >&2
        n_failed=$((n_failed + 1))
    fi
}

# poke OFFSET BYTES: overwrites bytes (printf escapes) of the shard
poke()
{
    printf "$2" | dd of="$dir/bad/$shard" bs=1 seek="$1" conv=notrunc status=none
}

# header: its length, and with it where the data starts
n_header=$(od -An -tu8 -N8 "$dir/good/$shard" | tr -d ' ')

# begin TENSOR: where the tensor's data begins in the file
begin()
{
    local at
    at=$(head -c $((8 + n_header)) "$dir/good/$shard" | tail -c +9 | tr '{' '\n' | tr '}' '\n' |
        grep -A1 "\"$1\":$" | grep -o 'data_offsets":\[[0-9]*' | grep -o '[0-9]*$')
    echo $((8 + n_header + at))
}

spoil
truncate -s 5 "$dir/bad/$shard"
refused "$shard: header length: want 8 bytes, the file has 5"
truncate -s 0 "$dir/bad/$shard"
refused "$shard: want a safetensors file, found 0 bytes"
spoil
truncate -s -1 "$dir/bad/$shard"
refused "data_offsets: want an end of at most"
spoil
printf x >>"$dir/bad/$shard"
refused "$shard: want the data to end at"
spoil
poke 0 '\377\377\377\377\377\377\377\177'
refused "$shard: header length: want at most"
spoil
poke 8 '['
refused "$shard: bad JSON at byte"
spoil
sed -i 's/"F8_E4M3"/"F8_E5M2"/' "$dir/bad/$shard"
refused "dtype: want F32, BF16, F16 or F8_E4M3, found 'F8_E5M2'"
spoil
sed -i 's/"shape":\[3584,256\]/"shape":[256,3584]/' "$dir/bad/$shard"
refused "shape: want [3584, 256], found [256, 3584]"
spoil
sed -i 's/"model\.norm\.weight"/"model.narm.weight"/' "$dir/bad/$shard" "$dir/bad/$index"
refused "tensor 'model.norm.weight': missing"
spoil
sed -i 's/"num_nextn_predict_layers": 1/"num_nextn_predict_layers": 0/' "$dir/bad/config.json"
refused "surplus: nothing in config.json asks for it"
spoil
poke "$(begin model.layers.1.mlp.experts.5.up_proj.weight)" '\177'
refused "$shard: tensor 'model.layers.1.mlp.experts.5.up_proj.weight': row 0, column 0: want a finite fp8_e4m3, found NaN"
spoil
poke "$(begin model.layers.1.mlp.experts.5.up_proj.weight_scale_inv)" '\0\0\0\0'
refused "tensor 'model.layers.1.mlp.experts.5.up_proj.weight_scale_inv': block [0, 0]: want a finite scale above 0, found 0"
poke "$(begin model.layers.1.mlp.experts.5.up_proj.weight_scale_inv)" '\0\0\200\177'
refused "want a finite scale above 0, found inf"
spoil
mv "$dir/bad/$shard" "$dir/bad/other.safetensors"
refused "$index: names shard '$shard', which is not there"
spoil
sed -i "s|\"$shard\"|\"../good/$shard\"|" "$dir/bad/$index"
refused "want a file name without a folder, found '../good/$shard'"
spoil
sed -i 's/"weight_map"/"weight_mop"/' "$dir/bad/$index"
refused "$index: weight_map: want an object"
rm "$dir/bad/$index"
refused "$dir/bad: want $index or model.safetensors, found neither"
spoil
sed -i 's/"hidden_act": "silu"/"hidden_act": "gelu"/' "$dir/bad/config.json"
refused "config.json: hidden_act: only 'silu' is implemented, found 'gelu'"
sed -i '/"hidden_size"/d' "$dir/bad/config.json"
refused "config.json: hidden_size: missing"
printf '{"hidden_size": ' >"$dir/bad/config.json"
refused "config.json: bad JSON at byte"
rm "$dir/bad/config.json"
refused "$dir/bad/config.json: cannot open: No such file or directory"
spoil
sed -i 's/"hidden_size": 256/"hidden_size": 256.0/' "$dir/bad/config.json"
refused "config.json: hidden_size: want a whole number from 1 to 131072, found 256.0"
# a field of what is not implemented is not unknown: no warning before the error
spoil
sed -i 's/"type": "yarn"/"type": "linear"/' "$dir/bad/config.json"
grep -q '"linear"' "$dir/bad/config.json" ||
    sed -i 's/"rope_scaling": null/"rope_scaling": {"type": "linear", "factor": 2}/' "$dir/bad/config.json"
refused "rope_scaling.rope_type: only 'yarn' and 'default' are implemented, found 'linear'"

[ "$n_failed" -eq 0 ] || exit 1
echo "bad input: ok"
