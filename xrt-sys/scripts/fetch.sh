#!/usr/bin/env bash
# Unpacks XRT 2.25, its NPU driver library and its tools into a folder of its own: no root, no change to the system.
# usage: fetch.sh FOLDER
#
# The packages are Debian's. Where they come from is what this machine's own apt is configured for; the first suite that
# has XRT 2.25 is looked up there under private lists, so that apt's own are not touched.
set -euo pipefail

version=2.25
suites=(sid testing)
into=${1:?usage: fetch.sh FOLDER}
mkdir -p "$into"
into=$(cd "$into" && pwd)

if [ -e "$into/.complete" ] && [ "$(cat "$into/.complete")" = "$version" ]; then
    echo "XRT $version is in $into"
    exit 0
fi
for tool in apt-get dpkg; do
    command -v $tool >/dev/null || { echo "fetch.sh: $tool is not here: on other systems install XRT $version by hand" >&2; exit 1; }
done

mirror=$(apt-get indextargets --format '$(REPO_URI)|$(RELEASE)' 'Created-By: Packages' |
    awk -F'|' '$1 !~ /security/ && $1 ~ /debian\/?$/ { print $1; exit }')
[ -n "$mirror" ] || { echo "fetch.sh: apt's configuration names no Debian archive" >&2; exit 1; }

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keyring" ] || { echo "fetch.sh: no $keyring: install debian-archive-keyring" >&2; exit 1; }

private=$into/.apt
trap 'rm -rf "$private"' EXIT
options=(
    -o "Dir::Etc::sourcelist=$private/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State::Lists=$private/lists" -o "Dir::Cache=$private" -o Acquire::Languages=none -o Acquire::Retries=3
)
seen=()
for suite in "${suites[@]}"; do
    rm -rf "$private"
    mkdir -p "$private/lists/partial" "$private/archives/partial" "$private/packages"
    echo "deb [signed-by=$keyring] ${mirror%/} $suite main" >"$private/sources.list"
    apt-get "${options[@]}" -qq update
    found=$(apt-cache "${options[@]}" show libxrt2 2>/dev/null | awk '/^Version:/ { print $2; exit }' || true)
    case ${found#*:} in
    $version | $version.*) break ;;
    esac
    seen+=("XRT ${found:-nothing} in $suite")
done
[ ${#seen[@]} -lt ${#suites[@]} ] || { (IFS=,; echo "fetch.sh: found ${seen[*]}; expected $version") >&2; exit 1; }

# What runs, what compiles, and the assembler with the libraries it needs (two levels of its own dependencies).
packages=(libxrt2 libxrt-npu2 libc6 libstdc++6 libgcc-s1 libuuid1 libxrt-dev uuid-dev libxrt-utils libxrt-utils-npu)
tools=(libxrt-utils libxrt-utils-npu)
for _ in 1 2; do
    mapfile -t more < <(apt-cache "${options[@]}" depends --no-recommends --no-suggests --no-conflicts --no-breaks \
        --no-replaces --no-enhances "${tools[@]}" | awk '$1 ~ /Depends:/ && $2 ~ /^(lib|zlib)/ { print $2 }')
    tools+=("${more[@]}")
done
mapfile -t packages < <(printf '%s\n' "${packages[@]}" "${tools[@]}" | sort -u)

# apt warns that it downloads unsandboxed when the folder is not its own user's.
(cd "$private/packages" && apt-get "${options[@]}" -qq download "${packages[@]/%/:amd64}") \
    2> >(grep -v unsandboxed >&2)

# The suite has one merged tree: the links must be there before anything is unpacked.
mkdir -p "$into/usr/lib" "$into/usr/lib64" "$into/usr/bin"
for folder in lib lib64 bin; do
    [ -e "$into/$folder" ] || ln -s "usr/$folder" "$into/$folder"
done
for package in "$private"/packages/*.deb; do
    dpkg -x "$package" "$into"
done
libraries=$into/usr/lib/x86_64-linux-gnu
rm -f "$libraries"/*.a
rm -rf "$into"/usr/share/{doc,locale,lintian} "$libraries/gconv"
echo "$version" >"$into/.complete"
echo "XRT $version is in $into"
