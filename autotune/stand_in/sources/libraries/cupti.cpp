// libcupti: its version. All else says that it isn't initialised (stubs.py), and profilers go on without it.
extern "C" int cuptiGetVersion(unsigned* version) {
  *version = 130000;
  return 0;
}
