"""Prints how much of the address space a core dump would have besides files, in MiB."""
total, fields = 0, []
for line in open("/proc/self/smaps"):
    words = line.split()
    if not words[0].endswith(":"):
        fields = words
    elif words[0] == "Size:":
        size = int(words[1])
    elif words[0] == "VmFlags:" and "dd" not in words and (len(fields) < 6 or not fields[5].startswith("/") or fields[-1] == "(deleted)"):
        total += size
print(total >> 10)
