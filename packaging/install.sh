#!/bin/sh
# Installs foliomem from the archive that this lies in:
#   ./install.sh [--prefix DIR] [--device]     into DIR (default /usr/local); --device lets the group foliomem use it (root)
#   ./install.sh [--prefix DIR] --uninstall    removes what was installed there
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix=/usr/local
action=install
device=no
while [ $# -gt 0 ]; do
    case $1 in
    --prefix) prefix=${2:?--prefix needs a directory}; shift ;;
    --prefix=*) prefix=${1#--prefix=} ;;
    --device) device=yes ;;
    --uninstall) action=uninstall ;;
    *) sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done
rule=/etc/udev/rules.d/60-foliomem.rules
list=$prefix/lib/foliomem/installed-files

uninstall() {
    [ -f "$list" ] || { echo "install.sh: nothing is installed in $prefix" >&2; exit 1; }
    if [ -f "$prefix/lib/foliomem/with-device" ]; then
        rm -f $rule "$prefix/lib/foliomem/with-device"
        "$prefix/lib/foliomem/device" undo
    fi
    # The lists lie among what they list.
    files=$(cat "$list")
    folders=$(sort -r "$list-folders")
    echo "$files" | while IFS= read -r file; do rm -f "$prefix/$file"; done
    rm -f "$list" "$list-folders"
    # Folders that others have put something into stay.
    echo "$folders" | while IFS= read -r folder; do rmdir "$prefix/$folder" 2>/dev/null || true; done
}

if [ $action = uninstall ]; then
    uninstall
    exit 0
fi
cd "$here"
# An older version first: it may have files that this one has not.
if [ -f "$list" ]; then uninstall; fi
mkdir -p "$prefix"
made=$(find bin lib share -type d | sort | while IFS= read -r folder; do
    [ -d "$prefix/$folder" ] || { mkdir "$prefix/$folder" && echo "$folder"; }
done)
find bin lib share -type f | while IFS= read -r file; do
    # Programs that run keep the old file.
    cp -p "$file" "$prefix/$file.new"
    mv -f "$prefix/$file.new" "$prefix/$file"
done
find bin lib share -type f >"$list"
echo "$made" >"$list-folders"
if [ $device = yes ]; then
    mkdir -p "$(dirname $rule)"
    cp "$prefix/lib/udev/rules.d/60-foliomem.rules" $rule
    : >"$prefix/lib/foliomem/with-device"
    "$prefix/lib/foliomem/device" allow
fi
echo "installed foliomem in $prefix; next: $prefix/bin/foliomem doctor"
