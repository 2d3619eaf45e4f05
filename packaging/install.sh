#!/bin/sh
# Installs foliomem from the archive that this lies in:
#   ./install.sh [--prefix DIR] [--setup]      into DIR (default /usr/local); --setup also does `foliomem setup` (root)
#   ./install.sh [--prefix DIR] --uninstall    removes what was installed there
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix=/usr/local
action=install
setup=no
while [ $# -gt 0 ]; do
    case $1 in
    --prefix) prefix=${2:?--prefix needs a directory}; shift ;;
    --prefix=*) prefix=${1#--prefix=} ;;
    --setup) setup=yes ;;
    --uninstall) action=uninstall ;;
    *) sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done
list=$prefix/lib/foliomem/installed-files

mark=$prefix/lib/foliomem/with-setup

remove_files() {
    # The lists lie among what they list.
    files=$(cat "$list")
    folders=$(LC_ALL=C sort -r "$list-folders")
    echo "$files" | while IFS= read -r file; do rm -f "$prefix/$file"; done
    rm -f "$list" "$list-folders"
    # Folders that others have put something into stay. The folder of the prefix itself is "." in the list.
    echo "$folders" | while IFS= read -r folder; do rmdir "$prefix/${folder#.}" 2>/dev/null || true; done
}

if [ $action = uninstall ]; then
    [ -f "$list" ] || { echo "install.sh: nothing is installed in $prefix" >&2; exit 1; }
    if [ -f "$mark" ]; then
        rm -f "$mark"
        if [ -e /var/lib/foliomem/setup/machine.json ]; then "$prefix/bin/foliomem" setup --undo; fi
    fi
    remove_files
    exit 0
fi
cd "$here"
# An older version first: it may have files that this one has not. What it has set up stays, and its group has its members.
older=
if [ -f "$list" ]; then
    older=$(cat "$list-folders")
    remove_files
fi
mkdir -p "$(dirname "$prefix")"
made=$({ echo .; find bin lib share -type d | sort; } | while IFS= read -r folder; do
    [ -d "$prefix/$folder" ] || { mkdir "$prefix/${folder#.}" && echo "$folder"; }
done)
find bin lib share -type f | while IFS= read -r file; do
    # Programs that run keep the old file.
    cp -p "$file" "$prefix/$file.new"
    mv -f "$prefix/$file.new" "$prefix/$file"
done
find bin lib share -type f >"$list"
printf '%s\n' "$older" "$made" | sort -u | sed '/^$/d' >"$list-folders"
if [ $setup = yes ]; then
    : >"$mark"
    "$prefix/bin/foliomem" setup
fi
echo "installed foliomem in $prefix; next: $prefix/bin/foliomem doctor"
