// The old versions of functions whose new ones glibc 2.28 does not have: calls of this library go to them. What the
// compiler's newest headers and static libraries call, is here; auditwheel names what is missing. On glibc before 2.34
// those of threads and of dlopen are in libpthread and libdl, which the library is linked to.
//
// The versions below are those of x86-64. On aarch64 the first of every function is 2.17.
.macro old name version
#if defined(__x86_64__)
  .symver old_\name, \name@GLIBC_\version
#elif defined(__aarch64__)
  .symver old_\name, \name@GLIBC_2.17
#else
#error "the versions are those of x86-64 and aarch64"
#endif
  .globl \name
  .type \name, %function
\name:
#if defined(__x86_64__)
  jmp *old_\name@GOTPCREL(%rip)
#else
  adrp x16, :got:old_\name
  ldr x16, [x16, :got_lo12:old_\name]
  br x16
#endif
  .size \name, . - \name
.endm

  .text
  old dladdr 2.2.5
  old dlclose 2.2.5
  old dlerror 2.2.5
  old dlmopen 2.3.4
  old dlopen 2.2.5
  old dlsym 2.2.5
  old dlvsym 2.2.5
  old exp 2.2.5
  old exp2 2.2.5
  old hypot 2.2.5
  old hypotf 2.2.5
  old log 2.2.5
  old log2 2.2.5
  old pow 2.2.5
  old pthread_condattr_setpshared 2.2.5
  old pthread_create 2.2.5
  old pthread_detach 2.2.5
  old pthread_getspecific 2.2.5
  old pthread_join 2.2.5
  old pthread_key_create 2.2.5
  old pthread_key_delete 2.2.5
  old pthread_kill 2.2.5
  old pthread_mutex_trylock 2.2.5
  old pthread_mutexattr_destroy 2.2.5
  old pthread_mutexattr_init 2.2.5
  old pthread_mutexattr_setpshared 2.2.5
  old pthread_mutexattr_settype 2.2.5
  old pthread_once 2.2.5
  old pthread_rwlock_destroy 2.2.5
  old pthread_rwlock_init 2.2.5
  old pthread_rwlock_rdlock 2.2.5
  old pthread_rwlock_timedrdlock 2.2.5
  old pthread_rwlock_timedwrlock 2.2.5
  old pthread_rwlock_tryrdlock 2.2.5
  old pthread_rwlock_trywrlock 2.2.5
  old pthread_rwlock_unlock 2.2.5
  old pthread_rwlock_wrlock 2.2.5
  old pthread_rwlockattr_destroy 2.2.5
  old pthread_rwlockattr_init 2.2.5
  old pthread_rwlockattr_setpshared 2.2.5
  old pthread_setspecific 2.2.5
  old pthread_spin_destroy 2.2.5
  old pthread_spin_init 2.2.5
  old pthread_spin_lock 2.2.5
  old pthread_spin_trylock 2.2.5
  old pthread_spin_unlock 2.2.5
  old sem_destroy 2.2.5
  old sem_init 2.2.5
  old sem_post 2.2.5
  old sem_timedwait 2.2.5
  old sem_trywait 2.2.5
  old sem_wait 2.2.5
  old shm_open 2.2.5
  old shm_unlink 2.2.5

  .section .note.GNU-stack, "", @progbits
