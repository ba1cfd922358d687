# 200 faults of ranks at every stage of start and step (pod_test.c), and nothing left. ctest: long
YARD_TEST_FAULTS=200 exec "$YARD_BUILD_DIR/tests/test_engine_pod"
