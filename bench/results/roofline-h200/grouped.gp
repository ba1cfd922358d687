set terminal svg noenhanced size 900,640 font 'sans,12' background 'white'
set output 'grouped.svg'
set datafile separator '\t'
set logscale xy
set grid
set title 'Products of routed experts on NVIDIA H200; stars: batch 128'
set xlabel 'FLOP per byte (one byte a result, all weights read)'
set ylabel 'TFLOP/s'
set key bottom right font ',10'
set samples 500
plot [0.5:4000] (x * 4.67 < 1300 ? x * 4.67 : 1300) with lines lw 2 lc 'black' title '4.67 TB/s, 1300 TFLOP/s measured', \
  'grouped.dat' index 0 using 13:15 with linespoints pt 7 ps 0.5 lc 1 title 'gate_up, EP8', \
  'grouped.dat' index 0 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 1 notitle, \
  'grouped.dat' index 0 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 1 using 13:15 with linespoints pt 7 ps 0.5 lc 2 title 'gate_up, EP16', \
  'grouped.dat' index 1 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 2 notitle, \
  'grouped.dat' index 1 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 2 using 13:15 with linespoints pt 7 ps 0.5 lc 3 title 'gate_up, EP32', \
  'grouped.dat' index 2 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 3 notitle, \
  'grouped.dat' index 2 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 3 using 13:15 with linespoints pt 7 ps 0.5 lc 4 title 'gate_up, EP64', \
  'grouped.dat' index 3 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 4 notitle, \
  'grouped.dat' index 3 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 4 using 13:15 with linespoints pt 7 ps 0.5 lc 5 title 'gate_up, EP128', \
  'grouped.dat' index 4 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 5 notitle, \
  'grouped.dat' index 4 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 5 using 13:15 with linespoints pt 7 ps 0.5 lc 6 title 'down, EP8', \
  'grouped.dat' index 5 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 6 notitle, \
  'grouped.dat' index 5 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 6 using 13:15 with linespoints pt 7 ps 0.5 lc 7 title 'down, EP16', \
  'grouped.dat' index 6 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 7 notitle, \
  'grouped.dat' index 6 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 7 using 13:15 with linespoints pt 7 ps 0.5 lc 8 title 'down, EP32', \
  'grouped.dat' index 7 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 8 notitle, \
  'grouped.dat' index 7 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 8 using 13:15 with linespoints pt 7 ps 0.5 lc 9 title 'down, EP64', \
  'grouped.dat' index 8 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 9 notitle, \
  'grouped.dat' index 8 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle, \
  'grouped.dat' index 9 using 13:15 with linespoints pt 7 ps 0.5 lc 10 title 'down, EP128', \
  'grouped.dat' index 9 using ($4 == 128 ? $13 : 1/0):15 with points pt 3 ps 1.5 lc 10 notitle, \
  'grouped.dat' index 9 using ($4 == 128 ? $13 : 1/0):15:(sprintf('m = %g', $6)) with labels offset 0,-1 font ',9' notitle
