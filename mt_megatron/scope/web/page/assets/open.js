// After a one-time link: go on by a request of this site, so that the browser sends the Strict cookie.
location.replace('/');
