;; The records of `foliomem bench languages` in Scheme: arguments are the records and the rounds. Each round replaces a
;; quarter of the records and reads others at random; the printed total depends on all of them.
(use-modules (srfi srfi-9))

(define count (string->number (list-ref (command-line) 1)))
(define rounds (string->number (list-ref (command-line) 2)))
(define words
  #("north" "river" "stone" "market" "winter" "copper" "garden" "silver"
    "harbour" "meadow" "lantern" "orchard" "thunder" "village" "whisper" "yellow"))
(define seed 1)
(define total 0)

(define-record-type entry (make-entry name counts sum) entry?
  (name entry-name) (counts entry-counts) (sum entry-sum))

(define (random-below below)
  (set! seed (modulo (* seed 16807) 2147483647))
  (modulo seed below))

(define (random-word) (vector-ref words (random-below 16)))

(define (make)
  (let* ((first (random-word))
         (second (random-word))
         (name (string-append first "-" second "-" (number->string (random-below 100000)))))
    (let loop ((left 8) (counts '()) (sum 0))
      (if (= left 0)
          (make-entry name counts sum)
          (let ((number (random-below 1000)))
            (loop (- left 1) (cons number counts) (+ sum number)))))))

(define (verify entry)
  (unless (= (apply + (entry-counts entry)) (entry-sum entry))
    (error "a record has changed:" (entry-name entry))))

(define (add number) (set! total (modulo (+ (* total 31) number) 2147483647)))

(define entries (make-vector count))

(define (replace i)
  (let ((old (vector-ref entries i)))
    (verify old)
    (vector-set! entries i (make))
    (add (string-length (string-join (reverse (string-split (entry-name old) #\-)) "+")))))

(do ((i 0 (+ i 1))) ((= i count))
  (vector-set! entries i (make)))
(do ((round 0 (+ round 1))) ((= round rounds))
  (let ((start (random-below count)))
    (do ((k 0 (+ k 1))) ((= k (quotient count 4)))
      (replace (modulo (+ start k) count))))
  (do ((k 0 (+ k 1))) ((= k (quotient count 16)))
    (add (entry-sum (vector-ref entries (random-below count))))))
(do ((i 0 (+ i 1))) ((= i count))
  (let ((entry (vector-ref entries i)))
    (verify entry)
    (add (+ (entry-sum entry) (string-length (entry-name entry))))))
(display total)
(newline)
