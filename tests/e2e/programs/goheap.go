// A Go heap of about ARGV[1] MiB in a program with cgo: filled, walked by goroutines; prints a checksum.
package main

// static int add(int a, int b) { return a + b; }
import "C"

import (
	"fmt"
	"os"
	"strconv"
	"sync"
)

func main() {
	size, _ := strconv.Atoi(os.Args[1])
	blocks := make([][]byte, size*16)
	var group sync.WaitGroup
	for w := 0; w < 4; w++ {
		group.Add(1)
		go func(w int) {
			defer group.Done()
			for i := w; i < len(blocks); i += 4 {
				b := make([]byte, 1<<16)
				for j := range b {
					b[j] = byte(i + j/512)
				}
				blocks[i] = b
			}
		}(w)
	}
	group.Wait()
	sum := C.int(0)
	for i, b := range blocks {
		for j, v := range b {
			if v != byte(i+j/512) {
				panic(fmt.Sprintf("block %d byte %d", i, j))
			}
		}
		sum = C.add(sum, C.int(b[i%len(b)]))
	}
	fmt.Println("checksum", sum, len(blocks))
}
