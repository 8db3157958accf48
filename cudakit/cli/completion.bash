%(complete_func)s() {
    local IFS=$'\n' response completion type value

    response=$(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
        %(complete_var)s=bash_complete "$1")

    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        case $type in
            dir) COMPREPLY=(); compopt -o dirnames ;;
            file) COMPREPLY=(); compopt -o default ;;
            plain) COMPREPLY+=("$value"); [[ $value == *[:@] ]] && compopt -o nospace ;;
        esac
    done
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
