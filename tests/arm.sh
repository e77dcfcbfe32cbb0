#!/bin/sh
# make arm: the native products of 64-bit ARM, built beside MLX, probed and tested, all of it under
# emulation: what they compute is tested so, and how fast they are is not.
#
# usage: tests/arm.sh FOLDER PYTHON TEST...    FOLDER keeps what is fetched: 80 MB of Debian, and
# wheels. PYTHON: of an environment whose MLX is to be the version.
set -eu
folder=$1 host=$2
shift 2
for command in mmdebstrap qemu-aarch64 aarch64-linux-gnu-g++; do
    command -v $command >/dev/null || {
        echo "make arm: skipped: no $command" \
            "(Debian: mmdebstrap qemu-user g++-aarch64-linux-gnu)" >&2
        exit 0
    }
done

# The system that the compiler links for.
if ! [ -d "$folder/root" ]; then
    mkdir -p "$folder"
    . /etc/os-release
    mmdebstrap --quiet --variant=extract --architectures=arm64 \
        --include=python3,libstdc++6,libgomp1 "$VERSION_CODENAME" "$folder/root.part"
    mv "$folder/root.part" "$folder/root"
fi
python=$(ls "$folder/root/usr/bin/"python3.* | head -n 1)
mlx=$("$host" -c 'from importlib.metadata import version; print(version("mlx"))')
if ! [ -d "$folder/mlx-$mlx" ]; then
    platforms=$(for n in 17 28 35; do echo "--platform manylinux_2_${n}_aarch64"; done)
    "$host" -m pip install --quiet --target "$folder/mlx.part" $platforms \
        --python-version "${python##*/python}" --only-binary :all: "mlx[cpu]==$mlx" \
        click hypothesis msgpack numpy psutil pytest pytest-xdist
    mv "$folder/mlx.part" "$folder/mlx-$mlx"
fi

# A program that is that Python, also to itself: nothing but it has to be emulated.
mkdir -p "$folder/path"
echo "import sys; sys.executable = '$folder/python'" >"$folder/path/sitecustomize.py"
cat >"$folder/python" <<END
#!/bin/sh
export PYTHONPATH="$folder/path:$folder/mlx-$mlx"
exec qemu-aarch64 -cpu "\${CPU:-max}" -L "$folder/root" "$python" "\$@"
END
chmod +x "$folder/python"

export CXX=aarch64-linux-gnu-g++
library=$(XDG_CACHE_HOME=$PWD/.pytest_cache/native "$folder/python" -m toastkit.native.building.libraries)
for each in cortex-a53:neon neoverse-n1:neon_dotprod max:neon_i8mm; do
    chosen=$(CPU=${each%:*} "$folder/python" -c 'import sys
from toastkit.native.library import load
print(load(sys.argv[1]).instructions)' "$library")
    echo "${each%:*}: $chosen"
    [ "$chosen" = "${each#*:}" ]
    CPU=${each%:*} "$folder/python" -m toastkit.native.building.probe "$library"
done
# A process that forks and then has threads again is too much for qemu-user (7.2).
exec "$folder/python" -m pytest -p no:cacheprovider -k "not fork and not a_limit_on_threads" "$@"
