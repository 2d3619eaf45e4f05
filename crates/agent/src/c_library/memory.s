# The functions that compilers call by name: memcpy, memmove, memset, memcmp, bcmp and strlen.
#
# Intel syntax, System V ABI, SSE2 only. All symbols are hidden: the agent binds to them when it is
# linked, and the dynamic loader sees neither a definition nor a reference.
#
# Copies of up to 128 bytes load everything before they store anything, so overlaps need no care.
# Longer ones keep one end in registers and align the stores to 16. `rep movsb` and `rep stosb` take
# over from REP_BYTES on, where their start-up cost no longer shows.

    .pushsection .text.foliomem_memory, "ax", @progbits
    .set REP_BYTES, 2048

    .macro function name
    .globl \name
    .hidden \name
    .type \name, @function
    .p2align 5
\name:
    .endm

    .macro done name
    .size \name, . - \name
    .endm

# void *memmove(void *rdi, const void *rsi, size_t rdx); memcpy is the same function.
    .globl memcpy
    .hidden memcpy
    .type memcpy, @function
    function memmove
    .set memcpy, memmove
    mov rax, rdi
    cmp rdx, 16
    jb 10f
    cmp rdx, 32
    ja 20f
    movups xmm0, [rsi]
    movups xmm1, [rsi + rdx - 16]
    movups [rdi], xmm0
    movups [rdi + rdx - 16], xmm1
    ret

    .p2align 4
10: # 0 to 15 bytes
    cmp edx, 8
    jb 11f
    mov rcx, [rsi]
    mov rsi, [rsi + rdx - 8]
    mov [rdi], rcx
    mov [rdi + rdx - 8], rsi
    ret
11: cmp edx, 4
    jb 12f
    mov ecx, [rsi]
    mov esi, [rsi + rdx - 4]
    mov [rdi], ecx
    mov [rdi + rdx - 4], esi
    ret
12: cmp edx, 1
    jb 14f
    je 13f
    movzx ecx, word ptr [rsi]
    movzx esi, word ptr [rsi + rdx - 2]
    mov [rdi], cx
    mov [rdi + rdx - 2], si
    ret
13: movzx ecx, byte ptr [rsi]
    mov [rdi], cl
14: ret

    .p2align 4
20: # 33 to 128 bytes
    movups xmm0, [rsi]
    movups xmm1, [rsi + 16]
    movups xmm2, [rsi + rdx - 32]
    movups xmm3, [rsi + rdx - 16]
    cmp rdx, 64
    ja 21f
    movups [rdi], xmm0
    movups [rdi + 16], xmm1
    movups [rdi + rdx - 32], xmm2
    movups [rdi + rdx - 16], xmm3
    ret
21: movups xmm4, [rsi + 32]
    movups xmm5, [rsi + 48]
    movups xmm6, [rsi + rdx - 64]
    movups xmm7, [rsi + rdx - 48]
    cmp rdx, 128
    ja 30f
    movups [rdi], xmm0
    movups [rdi + 16], xmm1
    movups [rdi + 32], xmm4
    movups [rdi + 48], xmm5
    movups [rdi + rdx - 64], xmm6
    movups [rdi + rdx - 48], xmm7
    movups [rdi + rdx - 32], xmm2
    movups [rdi + rdx - 16], xmm3
    ret

    .p2align 4
30: # More than 128 bytes. The last 64 are in xmm6, xmm7, xmm2, xmm3, the first 64 in xmm0, xmm1, xmm4, xmm5.
    mov rcx, rdi
    sub rcx, rsi
    cmp rcx, rdx
    jb 40f                              # the destination starts inside the source: from the end
    cmp rdx, REP_BYTES
    jae 50f
31: # From the start. r8: where the last 64 bytes go; rdi: aligned, after the first 16.
    lea r8, [rdi + rdx - 64]
    mov r9, rdi
    neg rcx                             # source - destination
    and rdi, -16
    add rdi, 16
    add rcx, rdi                        # the source of rdi
    .p2align 4
32: movups xmm4, [rcx]
    movups xmm5, [rcx + 16]
    movups xmm8, [rcx + 32]
    movups xmm9, [rcx + 48]
    movaps [rdi], xmm4
    movaps [rdi + 16], xmm5
    movaps [rdi + 32], xmm8
    movaps [rdi + 48], xmm9
    add rcx, 64
    add rdi, 64
    cmp rdi, r8
    jb 32b
    movups [r9], xmm0
    movups [r8], xmm6
    movups [r8 + 16], xmm7
    movups [r8 + 32], xmm2
    movups [r8 + 48], xmm3
    ret

    .p2align 4
40: # From the end. rdi + 64: where the first 64 bytes end; rdx: aligned end, before the last 16.
    test rcx, rcx
    jz 14b                              # onto itself
    lea r8, [rdi + rdx]
    lea r9, [rdi + 64]
    mov rdx, r8
    sub rdx, 1
    and rdx, -16
    mov r10, rdx
    sub r10, rcx                        # the source of rdx
    .p2align 4
41: movups xmm8, [r10 - 16]
    movups xmm9, [r10 - 32]
    movups xmm10, [r10 - 48]
    movups xmm11, [r10 - 64]
    movaps [rdx - 16], xmm8
    movaps [rdx - 32], xmm9
    movaps [rdx - 48], xmm10
    movaps [rdx - 64], xmm11
    sub r10, 64
    sub rdx, 64
    cmp rdx, r9
    ja 41b
    movups [rdi], xmm0
    movups [rdi + 16], xmm1
    movups [rdi + 32], xmm4
    movups [rdi + 48], xmm5
    movups [r8 - 16], xmm3
    ret

    .p2align 4
50: # Large. Where the source starts shortly after the destination `rep movsb` copies single bytes.
    cmp rcx, -64
    ja 31b
    mov rcx, rdx
    rep movsb
    ret
    done memmove
    .set .Lmemmove_bytes, . - memmove
    .size memcpy, .Lmemmove_bytes

# void *memset(void *rdi, int esi, size_t rdx)
    function memset
    mov rax, rdi
    movzx esi, sil
    mov rcx, 0x0101010101010101
    imul rcx, rsi
    cmp rdx, 16
    jb 10f
    movq xmm0, rcx
    punpcklqdq xmm0, xmm0
    movups [rdi], xmm0
    movups [rdi + rdx - 16], xmm0
    cmp rdx, 32
    ja 20f
    ret
    .p2align 4
10: cmp edx, 8
    jb 11f
    mov [rdi], rcx
    mov [rdi + rdx - 8], rcx
    ret
11: cmp edx, 4
    jb 12f
    mov [rdi], ecx
    mov [rdi + rdx - 4], ecx
    ret
12: cmp edx, 1
    jb 14f
    je 13f
    mov [rdi], cx
    mov [rdi + rdx - 2], cx
    ret
13: mov [rdi], cl
14: ret
    .p2align 4
20: movups [rdi + 16], xmm0
    movups [rdi + rdx - 32], xmm0
    cmp rdx, 64
    ja 21f
    ret
21: movups [rdi + 32], xmm0
    movups [rdi + 48], xmm0
    movups [rdi + rdx - 64], xmm0
    movups [rdi + rdx - 48], xmm0
    cmp rdx, 128
    ja 30f
    ret
30: cmp rdx, REP_BYTES
    jae 50f
    lea r8, [rdi + rdx - 64]            # from here on it is filled
    and rdi, -16
    add rdi, 64
    .p2align 4
31: movaps [rdi], xmm0
    movaps [rdi + 16], xmm0
    movaps [rdi + 32], xmm0
    movaps [rdi + 48], xmm0
    add rdi, 64
    cmp rdi, r8
    jb 31b
    ret
50: mov r8, rax
    mov eax, esi
    mov rcx, rdx
    rep stosb
    mov rax, r8
    ret
    done memset

# int memcmp(const void *rdi, const void *rsi, size_t rdx); bcmp is the same function.
    .globl bcmp
    .hidden bcmp
    .type bcmp, @function
    function memcmp
    .set bcmp, memcmp
    cmp rdx, 16
    jb 10f
    lea rcx, [rdx - 16]                 # the offset of the last 16 bytes
    xor r8d, r8d
    .p2align 4
1:  cmp r8, rcx
    jae 2f
    movups xmm0, [rdi + r8]
    movups xmm1, [rsi + r8]
    pcmpeqb xmm0, xmm1
    pmovmskb eax, xmm0
    sub eax, 0xffff
    jnz 3f
    add r8, 16
    jmp 1b
2:  mov r8, rcx
    movups xmm0, [rdi + r8]
    movups xmm1, [rsi + r8]
    pcmpeqb xmm0, xmm1
    pmovmskb eax, xmm0
    sub eax, 0xffff
    jnz 3f
    ret
3:  bsf eax, eax                        # the lowest byte that differs: equal ones left zero bits behind
    add r8, rax
    movzx eax, byte ptr [rdi + r8]
    movzx ecx, byte ptr [rsi + r8]
    sub eax, ecx
    ret
    .p2align 4
10: cmp edx, 8
    jb 11f
    mov rax, [rdi]
    mov rcx, [rsi]
    cmp rax, rcx
    jne 20f
    mov rax, [rdi + rdx - 8]
    mov rcx, [rsi + rdx - 8]
    cmp rax, rcx
    jne 20f
    xor eax, eax
    ret
11: cmp edx, 4
    jb 12f
    mov eax, [rdi]
    mov ecx, [rsi]
    cmp eax, ecx
    jne 20f
    mov eax, [rdi + rdx - 4]
    mov ecx, [rsi + rdx - 4]
    cmp eax, ecx
    jne 20f
    xor eax, eax
    ret
12: xor r8d, r8d
13: cmp r8, rdx
    je 14f
    movzx eax, byte ptr [rdi + r8]
    movzx ecx, byte ptr [rsi + r8]
    inc r8
    sub eax, ecx
    jz 13b
    ret
14: xor eax, eax
    ret
20: # The words differ: the first byte in memory decides.
    bswap rax
    bswap rcx
    cmp rax, rcx
    sbb eax, eax
    or eax, 1
    ret
    done memcmp
    .set .Lmemcmp_bytes, . - memcmp
    .size bcmp, .Lmemcmp_bytes

# size_t strlen(const char *rdi): aligned loads, which never reach into the next page.
    function strlen
    mov rax, rdi
    mov ecx, edi
    and rax, -16
    and ecx, 15
    pxor xmm0, xmm0
    movdqa xmm1, [rax]
    pcmpeqb xmm1, xmm0
    pmovmskb edx, xmm1
    shr edx, cl                         # a shift by 0 leaves the flags alone
    test edx, edx
    jz 1f
    bsf eax, edx
    ret
    .p2align 4
1:  add rax, 16
    movdqa xmm1, [rax]
    pcmpeqb xmm1, xmm0
    pmovmskb edx, xmm1
    test edx, edx
    jz 1b
    bsf edx, edx
    sub rax, rdi
    add rax, rdx
    ret
    done strlen

    .popsection
