/* Keeps a Chromium that is started with it preloaded from hearing that the machine's network changes.
 *
 * Chromium gives up all that it is loading when an interface of the machine gets or loses an address, also what it
 * loads from the loopback (net::ERR_NETWORK_CHANGED). Beside it tests start and end containers, each with an interface.
 * It hears of changes through netlink's multicast groups (rtnetlink(7)): here it joins none, and still reads
 * what there is when it starts.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/netlink.h>
#include <sys/socket.h>

int bind(int fd, const struct sockaddr *address, socklen_t length)
{
	int (*next)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
	struct sockaddr_nl quiet;

	if (address && address->sa_family == AF_NETLINK && length >= sizeof quiet) {
		quiet = *(const struct sockaddr_nl *)address;
		quiet.nl_groups = 0;
		return next(fd, (const struct sockaddr *)&quiet, sizeof quiet);
	}
	return next(fd, address, length);
}
