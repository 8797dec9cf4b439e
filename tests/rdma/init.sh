#!/bin/busybox sh
# The first process of a guest: modules, the host's root read-only, a Soft-RoCE device, then one program.
busy=/bin/busybox
for kind in proc sysfs:sys devtmpfs:dev; do $busy mount -t "${kind%%:*}" none "/${kind##*:}"; done
while read -r module; do $busy insmod "/modules/$module" || echo "no $module"; done < /modules/order
$busy mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose root /host || $busy poweroff -f
for kind in dev proc sys; do $busy mount --move /$kind /host/$kind; done
$busy mount -t tmpfs -o mode=755 none /host/run
$busy mkdir -p /host/run/tmp /host/run/home /host/run/out /host/dev/shm
$busy mount -t tmpfs -o mode=1777 none /host/dev/shm
$busy mount -t 9p -o rw,trans=virtio,version=9p2000.L,msize=131072,cache=none out /host/run/out
$busy cp $busy /host/run/busybox
$busy chroot /host /run/busybox sh -c '
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  for path in /sys/class/net/e*; do card=${path##*/}; done
  ip link set lo up
  . /run/out/setup
  rdma link add rxe0 type rxe netdev "$card"
  . /run/out/later
  ulimit -l unlimited
  cd /run/home && . /run/out/program < /dev/null > /dev/ttyS1 2>&1
  echo $? > /run/out/status
  /run/busybox sync
'
$busy poweroff -f
