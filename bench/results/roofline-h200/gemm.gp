set terminal svg noenhanced size 900,640 font 'sans,12' background 'white'
set output 'gemm.svg'
set datafile separator '\t'
set logscale xy
set grid
set title 'Projections of a layer on NVIDIA H200; stars: batch 128'
set xlabel 'FLOP per byte (one byte a result, all weights read)'
set ylabel 'TFLOP/s'
set key bottom right font ',10'
set samples 500
plot [0.5:4000] (x * 4.67 < 1300 ? x * 4.67 : 1300) with lines lw 2 lc 'black' title '4.67 TB/s, 1300 TFLOP/s measured', \
  'gemm.dat' index 0 using 13:15 with linespoints pt 7 ps 0.5 lc 1 title 'qkv_a', \
  'gemm.dat' index 0 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 1 notitle, \
  'gemm.dat' index 1 using 13:15 with linespoints pt 7 ps 0.5 lc 2 title 'q_a', \
  'gemm.dat' index 1 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 2 notitle, \
  'gemm.dat' index 2 using 13:15 with linespoints pt 7 ps 0.5 lc 3 title 'kv_a', \
  'gemm.dat' index 2 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 3 notitle, \
  'gemm.dat' index 3 using 13:15 with linespoints pt 7 ps 0.5 lc 4 title 'q_b', \
  'gemm.dat' index 3 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 4 notitle, \
  'gemm.dat' index 4 using 13:15 with linespoints pt 7 ps 0.5 lc 5 title 'o', \
  'gemm.dat' index 4 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 5 notitle, \
  'gemm.dat' index 5 using 13:15 with linespoints pt 7 ps 0.5 lc 6 title 'shared_gate_up', \
  'gemm.dat' index 5 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 6 notitle, \
  'gemm.dat' index 6 using 13:15 with linespoints pt 7 ps 0.5 lc 7 title 'shared_down', \
  'gemm.dat' index 6 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 7 notitle, \
  'gemm.dat' index 7 using 13:15 with linespoints pt 7 ps 0.5 lc 8 title 'dense_gate_up', \
  'gemm.dat' index 7 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 8 notitle, \
  'gemm.dat' index 8 using 13:15 with linespoints pt 7 ps 0.5 lc 9 title 'dense_down', \
  'gemm.dat' index 8 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 9 notitle, \
  'gemm.dat' index 9 using 13:15 with linespoints pt 7 ps 0.5 lc 10 title 'router', \
  'gemm.dat' index 9 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 10 notitle, \
  'gemm.dat' index 10 using 13:15 with linespoints pt 7 ps 0.5 lc 11 title 'eh_proj', \
  'gemm.dat' index 10 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 11 notitle
